"""Relu: y = max(x, 0); NaN stays NaN."""

import numpy as np

from whet.ops._base import op
from whet.ops._types import infer_same_as_input, list_same_axis_couples

op(
    "Relu",
    infer_same_as_input,
    lambda layer, x: np.maximum(x, x.dtype.type(0)),
    samples=[(["f32[2,3,4,5]"], {}), (["extreme f32[4,16]"], {}), (["f32[1,64,7,7]"], {}), (["f32[3,17]"], {})],
    couples=lambda layer: list_same_axis_couples(layer.inputs[0], layer.output),
    pointwise=True,
)
