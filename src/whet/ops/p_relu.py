"""PRelu: y = x, or slope * x below 0; the slope broadcasts to x."""

import numpy as np

from whet.errors import NetworkError
from whet.ops._base import op
from whet.ops._binary import list_binary_couples
from whet.ops._types import may_broadcast_to


def infer(layer):
    x, slope = layer.inputs
    if x.dtype != slope.dtype or not may_broadcast_to(x.shape, slope.shape):
        raise NetworkError(f"a slope {slope.type} does not broadcast to {x.type}")
    return x.type


op(
    "PRelu",
    infer,
    lambda layer, x, slope: np.where(x >= 0, x, x * slope),
    samples=[
        (["f32[2,16,4,5]", "const f32[16,1,1]"], {}),
        (["extreme f32[4,16]", "const f32[1]"], {}),
        (["f32[3,17]", "f32[3,17]"], {}),
    ],
    couples=list_binary_couples,
    pointwise=True,
)
