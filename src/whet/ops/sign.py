"""Sign: -1, 0 or 1; NaN stays NaN."""

import numpy as np

from whet.ops._unary import register_unary

register_unary("Sign", np.sign, floats=False)
