"""Ceil: the smallest whole number that is not below x."""

import numpy as np

from whet.ops._unary import known_input, unary

unary("Ceil", np.ceil, shape_value=known_input)
