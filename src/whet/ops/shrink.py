"""Shrink: y = x + bias below -lambd, x - bias above lambd, else 0."""

import numpy as np

from whet.ops._unary import register_unary


def shrink(x, bias, lambd):
    return np.where(x < -lambd, x + bias, np.where(x > lambd, x - bias, x.dtype.type(0)))


register_unary("Shrink", shrink, attrs={"bias": 0.0, "lambd": 0.5}, samples=[{"bias": 0.5, "lambd": 1.0}])
