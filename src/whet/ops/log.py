"""Log: the natural logarithm; NaN below 0, -inf at 0."""

import numpy as np

from whet.ops._unary import unary

unary("Log", np.log)
