"""Size: the number of x's elements, as an i64 scalar."""

import numpy as np

from whet.network import I64, TensorType
from whet.ops._base import Couple, op

op(
    "Size",
    lambda layer: TensorType(I64, ()),
    lambda layer, x: np.array(x.size, np.int64),
    couples=lambda layer: [Couple(t, i, t, i) for t in layer.inputs for i in range(t.type.rank)],
    shape_value=lambda layer: [(layer.inputs[0].type.elements,)],
    samples=[(["f32[2,3,4]"], {}), (["f32[]"], {}), (["i64[7]"], {})],
)
