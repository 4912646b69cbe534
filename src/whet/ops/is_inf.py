"""IsInf: true where x is infinite; either sign may be excluded."""

import numpy as np

from whet.network import BOOL
from whet.ops._base import op
from whet.ops._types import list_same_axis_couples, require_float_input


def compute_reference(layer, x):
    up, down = layer.attrs["detect_positive"], layer.attrs["detect_negative"]
    return np.isinf(x) & ((x > 0) & bool(up) | (x < 0) & bool(down))


op(
    "IsInf",
    lambda layer: require_float_input(layer).with_dtype(BOOL),
    compute_reference,
    attrs={"detect_negative": 1, "detect_positive": 1},
    samples=[
        (["extreme f32[4,16]"], {}),
        (["extreme f32[3,5]"], {"detect_negative": 0}),
        (["extreme f64[13]"], {"detect_positive": 0}),
        (["extreme f32[13]"], {"detect_positive": 0, "detect_negative": 0}),
    ],
    couples=lambda layer: list_same_axis_couples(layer.inputs[0], layer.output),
    pointwise=True,
)
