"""ArgMin: index of the smallest value along `axis`."""

import numpy as np

from whet.ops._arg import register_arg

register_arg("ArgMin", np.argmin)
