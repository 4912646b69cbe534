"""Atanh: the inverse hyperbolic function; NaN outside [-1, 1]."""

import numpy as np

from whet.ops._unary import unary

unary("Atanh", np.arctanh)
