"""Asin: the inverse function, radians; NaN outside [-1, 1]."""

import numpy as np

from whet.ops._unary import register_unary

register_unary("Asin", np.arcsin)
