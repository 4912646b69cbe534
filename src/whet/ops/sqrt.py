"""Sqrt: the square root; NaN below 0."""

import numpy as np

from whet.ops._unary import unary

unary("Sqrt", np.sqrt)
