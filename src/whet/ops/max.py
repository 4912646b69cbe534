"""Max: the largest of any number of tensors, elementwise with broadcasting; NaN wins."""

from functools import reduce

import numpy as np

from whet.network import maximum
from whet.ops._base import known_values, op
from whet.ops._binary import FLOAT_SAMPLES, INT_SAMPLES, binary_couples, infer_variadic


def shape_value(layer):
    values = [known_values(t) for t in layer.inputs]
    if any(v is None for v in values):
        return [None]
    n = max(len(v) for v in values)
    if any(len(v) not in (1, n) for v in values):
        return [None]
    return [tuple(reduce(maximum, row) for row in zip(*(v * (n // len(v)) for v in values), strict=True))]


op(
    "Max",
    infer_variadic,
    lambda layer, *xs: reduce(np.maximum, xs),
    samples=[*FLOAT_SAMPLES, *INT_SAMPLES, (["f32[3,5]"], {}), (["f32[3,5]", "f32[5]", "extreme f32[2,3,1]"], {})],
    couples=binary_couples,
    shape_value=shape_value,
    pointwise=True,
)
