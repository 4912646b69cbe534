"""LessOrEqual: true where a is not above b; false for NaN."""

import numpy as np

from whet.ops._binary import compare

compare("LessOrEqual", np.less_equal)
