"""Acosh: the inverse hyperbolic function; NaN below 1."""

import numpy as np

from whet.ops._unary import register_unary

register_unary("Acosh", np.arccosh)
