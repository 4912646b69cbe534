"""Round: the nearest integer, ties to even."""

import numpy as np

from whet.ops._base import keep_dims
from whet.ops._unary import unary

unary("Round", np.rint, shape_value=keep_dims)
