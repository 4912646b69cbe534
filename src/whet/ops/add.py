"""Add: elementwise sum with broadcasting."""

import numpy as np

from whet.ops._base import op
from whet.ops._binary import binary_couples, infer_binary, shape_arithmetic

op(
    "Add",
    infer_binary,
    lambda layer, a, b: np.add(a, b),
    samples=[
        (["f32[2,3,4,5]", "f32[2,3,4,5]"], {}),
        (["f32[1,16,8,8]", "const f32[16,1,1]"], {}),
        (["f32[2,3]", "f32[3]"], {}),
        (["extreme f32[4,16]", "f32[4,16]"], {}),
        (["i64[3]", "i64[1]"], {}),
    ],
    couples=binary_couples,
    shape_value=shape_arithmetic(lambda a, b: a + b),
    pointwise=True,
)
