"""Add: elementwise sum with broadcasting."""

import numpy as np

from whet.ops._base import fold_dims, op
from whet.ops._binary import FLOAT_SAMPLES, INT_SAMPLES, binary_couples, infer_binary

op(
    "Add",
    infer_binary,
    lambda layer, a, b: np.add(a, b),
    samples=[*FLOAT_SAMPLES, *INT_SAMPLES],
    couples=binary_couples,
    shape_value=fold_dims,
    pointwise=True,
)
