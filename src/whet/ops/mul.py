"""Mul: elementwise product with broadcasting."""

import numpy as np

from whet.ops._base import fold_dims, op
from whet.ops._binary import FLOAT_SAMPLES, INT_SAMPLES, infer_binary, list_binary_couples

op(
    "Mul",
    infer_binary,
    lambda layer, a, b: np.multiply(a, b),
    samples=[*FLOAT_SAMPLES, *INT_SAMPLES],
    couples=list_binary_couples,
    shape_value=fold_dims,
    pointwise=True,
)
