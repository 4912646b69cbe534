"""HardSwish: y = x * max(0, min(1, x / 6 + 1/2))."""

import numpy as np

from whet.ops._unary import register_unary

register_unary("HardSwish", lambda x: x * np.maximum(0, np.minimum(1, x * (1 / 6) + 0.5)))
