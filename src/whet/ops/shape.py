"""Shape: x's dimensions from `start` to `end`, as i64."""

import numpy as np

from whet.network import I64, TensorType
from whet.ops._base import INT, Couple, op


def slice_shape(layer, shape):
    return tuple(shape)[slice(layer.attrs["start"], layer.attrs.get("end"))]


op(
    "Shape",
    lambda layer: TensorType(I64, (len(slice_shape(layer, layer.needs(0).shape)),)),
    lambda layer, x: np.array(slice_shape(layer, x.shape), np.int64),
    attrs={"start": 0, "end": INT},
    couples=lambda layer: [Couple(t, i, t, i) for t in layer.inputs for i in range(t.type.rank)],
    shape_value=lambda layer: [slice_shape(layer, layer.inputs[0].shape)],
    samples=[(["f32[2,3,4]"], {}), (["f32[2,3,4,5]"], {"start": 1, "end": -1}), (["i64[7]"], {}), (["f32[]"], {})],
)
