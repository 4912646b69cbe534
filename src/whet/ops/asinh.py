"""Asinh: the inverse hyperbolic function."""

import numpy as np

from whet.ops._unary import unary

unary("Asinh", np.arcsinh)
