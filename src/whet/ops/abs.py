"""Abs: y = |x|."""

import numpy as np

from whet.ops._unary import unary

unary("Abs", np.abs, floats=False)
