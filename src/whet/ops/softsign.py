"""Softsign: y = x / (1 + |x|)."""

import numpy as np

from whet.ops._unary import register_unary

register_unary("Softsign", lambda x: x / (1 + np.abs(x)))
