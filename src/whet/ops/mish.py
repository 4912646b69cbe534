"""Mish: y = x * tanh(softplus(x))."""

import numpy as np

from whet.ops._unary import softplus, unary

unary("Mish", lambda x: x * np.tanh(softplus(x)))
