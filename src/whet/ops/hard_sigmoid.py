"""HardSigmoid: y = max(0, min(1, alpha * x + beta))."""

import numpy as np

from whet.ops._unary import register_unary

register_unary(
    "HardSigmoid",
    lambda x, alpha, beta: np.maximum(0, np.minimum(1, x * alpha + beta)),
    attrs={"alpha": 0.2, "beta": 0.5},
    samples=[{"alpha": 1 / 6, "beta": 0.5}],
)
