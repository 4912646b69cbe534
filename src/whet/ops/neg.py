"""Neg: y = -x."""

import numpy as np

from whet.ops._base import folded
from whet.ops._unary import unary

unary("Neg", np.negative, floats=False, shape_value=folded)
