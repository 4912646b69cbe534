"""GreaterOrEqual: true where a is not below b; false for NaN."""

import numpy as np

from whet.ops._binary import compare

compare("GreaterOrEqual", np.greater_equal)
