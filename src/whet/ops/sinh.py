"""Sinh: the hyperbolic function, elementwise."""

import numpy as np

from whet.ops._unary import register_unary

register_unary("Sinh", np.sinh)
