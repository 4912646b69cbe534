"""Sqrt: the square root; NaN below 0."""

import numpy as np

from whet.ops._unary import register_unary

register_unary("Sqrt", np.sqrt)
