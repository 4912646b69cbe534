"""Tanh: the hyperbolic function, elementwise."""

import numpy as np

from whet.ops._unary import unary

unary("Tanh", np.tanh)
