"""Mean: the mean of any number of tensors, elementwise with broadcasting."""

from functools import reduce

import numpy as np

from whet.ops._base import op
from whet.ops._binary import FLOAT_SAMPLES, infer_variadic, list_binary_couples
from whet.ops._types import require_float_input


def infer(layer):
    require_float_input(layer)
    return infer_variadic(layer)


op(
    "Mean",
    infer,
    lambda layer, *xs: reduce(np.add, xs) / xs[0].dtype.type(len(xs)),
    samples=[*FLOAT_SAMPLES, (["f32[3,5]"], {}), (["f32[3,5]", "f32[5]", "f32[2,3,1]"], {})],
    couples=list_binary_couples,
    pointwise=True,
)
