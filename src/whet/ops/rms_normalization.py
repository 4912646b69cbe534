"""RMSNormalization: normalizes the axes from `axis` on to root mean square 1, then a scale (input 1, of those axes)."""

import numpy as np

from whet.errors import NetworkError
from whet.ops._base import Couple, op
from whet.ops._normalized import normalized_couples
from whet.ops._types import axis_of, float_input, may_broadcast_to, one_float_type


def infer(layer):
    t, scale = float_input(layer), layer.inputs[1]
    one_float_type(layer, 1)
    axis = axis_of(layer.attrs["axis"], t.rank)
    if not may_broadcast_to(t.shape[axis:], scale.shape):
        raise NetworkError(f"RMSNormalization '{layer.name}': {scale} does not broadcast to the normalized axes of {t}")
    return t


def reference(layer, x, scale):
    axes = tuple(range(layer.attrs["axis"] % x.ndim, x.ndim))
    return x / np.sqrt((x * x).mean(axis=axes, keepdims=True) + x.dtype.type(layer.attrs["epsilon"])) * scale


op(
    "RMSNormalization",
    infer,
    reference,
    attrs={"axis": -1, "epsilon": 1e-5, "stash_type": 1},
    statistics=lambda layer: normalized_couples(layer, axis_of(layer.attrs["axis"], layer.inputs[0].type.rank)),
    couples=lambda layer: [Couple(layer.inputs[0], i, layer.output, i) for i in range(axis_of(layer.attrs["axis"], layer.inputs[0].type.rank))],
    samples=[
        (["f32[2,5,16]", "const f32[16]"], {}),
        (["f32[2,3,4,5]", "const f32[4,5]"], {"axis": 2, "epsilon": 1e-6}),
        (["f32[9,1024]", "const f32[1024]"], {}),
        (["extreme f32[4,16]", "const f32[16]"], {}),
    ],
)
