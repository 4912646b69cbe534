"""Tan: elementwise, radians."""

import numpy as np

from whet.ops._unary import unary

unary("Tan", np.tan)
