"""Celu: y = max(0, x) + min(0, alpha * (e^(x/alpha) - 1))."""

import numpy as np

from whet.ops._unary import register_unary

register_unary(
    "Celu",
    lambda x, alpha: np.maximum(x, 0) + np.minimum(0, alpha * np.expm1(np.minimum(x, 0) / alpha)),
    attrs={"alpha": 1.0},
    samples=[{"alpha": 2.0}],
)
