"""Less: true where a is below b; false for NaN."""

import numpy as np

from whet.ops._binary import compare

compare("Less", np.less)
