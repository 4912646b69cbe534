"""Add: elementwise sum with broadcasting."""

import numpy as np

from whet.ops._base import fold_dims, op
from whet.ops._binary import FLOAT_SAMPLES, INT_SAMPLES, infer_binary, list_binary_couples

op(
    "Add",
    infer_binary,
    lambda layer, a, b: np.add(a, b),
    samples=[*FLOAT_SAMPLES, *INT_SAMPLES],
    couples=list_binary_couples,
    shape_value=fold_dims,
    pointwise=True,
)
