"""Ceil: the smallest whole number that is not below x."""

import numpy as np

from whet.ops._unary import unary

unary("Ceil", np.ceil)
