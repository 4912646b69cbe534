"""Ceil: the smallest integer not below x."""

import numpy as np

from whet.ops._base import keep_dims
from whet.ops._unary import register_unary

register_unary("Ceil", np.ceil, shape_value=keep_dims)
