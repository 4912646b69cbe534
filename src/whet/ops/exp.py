"""Exp: y = e^x."""

import numpy as np

from whet.ops._unary import unary

unary("Exp", np.exp)
