"""IsNaN: true where x is not a number."""

import numpy as np

from whet.network import BOOL
from whet.ops._base import op
from whet.ops._types import list_same_axis_couples, require_float_input

op(
    "IsNaN",
    lambda layer: require_float_input(layer).with_dtype(BOOL),
    lambda layer, x: np.isnan(x),
    samples=[(["extreme f32[4,16]"], {}), (["f32[2,3,5]"], {}), (["extreme f64[13]"], {})],
    couples=lambda layer: list_same_axis_couples(layer.inputs[0], layer.output),
    pointwise=True,
)
