"""IsNaN: true where x is not a number."""

import numpy as np

from whet.network import BOOL
from whet.ops._base import op
from whet.ops._types import float_input, same_axes

op(
    "IsNaN",
    lambda layer: float_input(layer).with_dtype(BOOL),
    lambda layer, x: np.isnan(x),
    samples=[(["extreme f32[4,16]"], {}), (["f32[2,3,5]"], {}), (["extreme f64[13]"], {})],
    couples=lambda layer: same_axes(layer.inputs[0], layer.output),
    pointwise=True,
)
