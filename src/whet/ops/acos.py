"""Acos: the inverse function, radians; NaN outside [-1, 1]."""

import numpy as np

from whet.ops._unary import unary

unary("Acos", np.arccos)
