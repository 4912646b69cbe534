"""Atan: the inverse function, radians."""

import numpy as np

from whet.ops._unary import register_unary

register_unary("Atan", np.arctan)
