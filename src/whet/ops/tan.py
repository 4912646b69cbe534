"""Tan: elementwise, radians."""

import numpy as np

from whet.ops._unary import register_unary

register_unary("Tan", np.tan)
