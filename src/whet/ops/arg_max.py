"""ArgMax: index of the largest value along `axis`."""

import numpy as np

from whet.ops._arg import arg

arg("ArgMax", np.argmax)
