"""Mish: y = x * tanh(softplus(x))."""

import numpy as np

from whet.ops._unary import register_unary, softplus

register_unary("Mish", lambda x: x * np.tanh(softplus(x)))
