"""BitwiseOr: bitwise or of integers, elementwise with broadcasting."""

import numpy as np

from whet.ops._base import op
from whet.ops._binary import INT_SAMPLES, infer_integers, list_binary_couples

op(
    "BitwiseOr",
    infer_integers,
    lambda layer, a, b: np.bitwise_or(a, b),
    samples=[*INT_SAMPLES, (["u8[2,9]", "u8[9]"], {})],
    couples=list_binary_couples,
    pointwise=True,
)
