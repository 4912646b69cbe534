"""RMSNormalization: normalizes the axes from `axis` on to root mean square 1, then a scale (input 1, of those axes)."""

import numpy as np

from whet.errors import NetworkError
from whet.ops._base import Couple, op
from whet.ops._normalized import list_normalized_couples
from whet.ops._types import may_broadcast_to, normalize_axis, require_float_input, require_one_float_type


def infer(layer):
    t, scale = require_float_input(layer), layer.inputs[1]
    require_one_float_type(layer, 1)
    axis = normalize_axis(layer.attrs["axis"], t.rank)
    if not may_broadcast_to(t.shape[axis:], scale.shape):
        raise NetworkError(f"RMSNormalization '{layer.name}': {scale} does not broadcast to the normalized axes of {t}")
    return t


def compute_reference(layer, x, scale):
    axes = tuple(range(layer.attrs["axis"] % x.ndim, x.ndim))
    return x / np.sqrt((x * x).mean(axis=axes, keepdims=True) + x.dtype.type(layer.attrs["epsilon"])) * scale


op(
    "RMSNormalization",
    infer,
    compute_reference,
    attrs={"axis": -1, "epsilon": 1e-5, "stash_type": 1},
    statistics=lambda layer: list_normalized_couples(layer, normalize_axis(layer.attrs["axis"], layer.inputs[0].type.rank)),
    couples=lambda layer: [
        Couple(layer.inputs[0], i, layer.output, i) for i in range(normalize_axis(layer.attrs["axis"], layer.inputs[0].type.rank))
    ],
    samples=[
        (["f32[2,5,16]", "const f32[16]"], {}),
        (["f32[2,3,4,5]", "const f32[4,5]"], {"axis": 2, "epsilon": 1e-6}),
        (["f32[9,1024]", "const f32[1024]"], {}),
        (["extreme f32[4,16]", "const f32[16]"], {}),
    ],
)
