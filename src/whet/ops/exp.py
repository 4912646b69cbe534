"""Exp: y = e^x."""

import numpy as np

from whet.ops._unary import register_unary

register_unary("Exp", np.exp)
