"""Neg: y = -x."""

import numpy as np

from whet.ops._base import fold_dims
from whet.ops._unary import register_unary

register_unary("Neg", np.negative, floats=False, shape_value=fold_dims)
