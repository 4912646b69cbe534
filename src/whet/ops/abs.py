"""Abs: y = |x|."""

import numpy as np

from whet.ops._unary import register_unary

register_unary("Abs", np.abs, floats=False)
