"""Atanh: the inverse hyperbolic function; NaN outside [-1, 1]."""

import numpy as np

from whet.ops._unary import register_unary

register_unary("Atanh", np.arctanh)
