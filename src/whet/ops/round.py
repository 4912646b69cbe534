"""Round: the nearest whole number, halves to the even one."""

import numpy as np

from whet.ops._unary import known_input, unary

unary("Round", np.rint, shape_value=known_input)
