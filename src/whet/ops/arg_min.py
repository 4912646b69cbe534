"""ArgMin: where the smallest value stands along `axis`."""

import numpy as np

from whet.ops._arg import arg

arg("ArgMin", np.argmin)
