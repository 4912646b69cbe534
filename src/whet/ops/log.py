"""Log: the natural logarithm; NaN below 0, -inf at 0."""

import numpy as np

from whet.ops._unary import register_unary

register_unary("Log", np.log)
