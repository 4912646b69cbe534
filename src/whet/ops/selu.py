"""Selu: y = gamma * x, or gamma * alpha * (e^x - 1) below 0."""

import numpy as np

from whet.ops._unary import register_unary


def selu(x, alpha, gamma):
    return gamma * np.where(x > 0, x, alpha * np.expm1(np.minimum(x, 0)))


register_unary("Selu", selu, attrs={"alpha": 1.67326319217681884765625, "gamma": 1.05070102214813232421875}, samples=[{"alpha": 2.0, "gamma": 3.0}])
