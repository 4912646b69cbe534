"""Sign: -1, 0 or 1; NaN stays NaN."""

import numpy as np

from whet.ops._unary import unary

unary("Sign", np.sign, floats=False)
