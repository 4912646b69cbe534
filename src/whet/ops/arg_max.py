"""ArgMax: index of the largest value along `axis`."""

import numpy as np

from whet.ops._arg import register_arg

register_arg("ArgMax", np.argmax)
