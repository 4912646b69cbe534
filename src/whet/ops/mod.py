"""Mod: remainder with the divisor's sign (`fmod` 0) or the dividend's (`fmod` 1)."""

import numpy as np

from whet.ops._base import fold_dims, op
from whet.ops._binary import infer_binary, list_binary_couples

op(
    "Mod",
    infer_binary,
    lambda layer, a, b: np.fmod(a, b) if layer.attrs["fmod"] else np.mod(a, b),
    attrs={"fmod": 0},
    samples=[
        (["i64[3,4]", np.array([2, 3, 7, -2])], {}),
        (["i64[3,4]", np.array([2, 3, 7, -2])], {"fmod": 1}),
        (["f32[3,5]", "f32[5]"], {"fmod": 1}),
        (["extreme f32[4,16]", "f32[16]"], {"fmod": 1}),
        (["f32[3,5]", "f32[5]"], {}),
    ],
    couples=list_binary_couples,
    shape_value=lambda layer: [None] if layer.attrs["fmod"] else fold_dims(layer, 1),
    pointwise=True,
)
