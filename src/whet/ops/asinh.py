"""Asinh: the inverse hyperbolic function."""

import numpy as np

from whet.ops._unary import register_unary

register_unary("Asinh", np.arcsinh)
