"""Greater: true where a is above b; false for NaN."""

import numpy as np

from whet.ops._binary import compare

compare("Greater", np.greater)
