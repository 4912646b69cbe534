"""Floor: the largest integer not above x."""

import numpy as np

from whet.ops._base import keep_dims
from whet.ops._unary import register_unary

register_unary("Floor", np.floor, shape_value=keep_dims)
