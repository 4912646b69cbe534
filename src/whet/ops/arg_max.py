"""ArgMax: where the largest value stands along `axis`."""

import numpy as np

from whet.ops._arg import arg

arg("ArgMax", np.argmax)
