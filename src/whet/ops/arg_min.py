"""ArgMin: index of the smallest value along `axis`."""

import numpy as np

from whet.ops._arg import arg

arg("ArgMin", np.argmin)
