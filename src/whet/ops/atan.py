"""Atan: the inverse function, radians."""

import numpy as np

from whet.ops._unary import unary

unary("Atan", np.arctan)
