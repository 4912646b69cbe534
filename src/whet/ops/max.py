"""Max: the maximum of any number of tensors, elementwise with broadcasting; NaN propagates."""

from functools import reduce

import numpy as np

from whet.network import maximum
from whet.ops._base import op
from whet.ops._binary import FLOAT_SAMPLES, INT_SAMPLES, infer_variadic, list_binary_couples, shape_value_by

op(
    "Max",
    infer_variadic,
    lambda layer, *xs: reduce(np.maximum, xs),
    samples=[*FLOAT_SAMPLES, *INT_SAMPLES, (["f32[3,5]"], {}), (["f32[3,5]", "f32[5]", "extreme f32[2,3,1]"], {})],
    couples=list_binary_couples,
    shape_value=shape_value_by(maximum),
    pointwise=True,
)
