"""Floor: the largest whole number that is not above x."""

import numpy as np

from whet.ops._unary import known_input, unary

unary("Floor", np.floor, shape_value=known_input)
