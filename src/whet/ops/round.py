"""Round: the nearest integer, ties to even."""

import numpy as np

from whet.ops._base import keep_dims
from whet.ops._unary import register_unary

register_unary("Round", np.rint, shape_value=keep_dims)
