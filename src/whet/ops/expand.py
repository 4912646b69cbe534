"""Expand: x broadcast together with the shape of input 1 (or attribute `shape`)."""

import numpy as np

from whet.errors import NetworkError
from whet.ops._axes import make_attribute_exporter
from whet.ops._base import INTS, Couple, find_given_dims, fold_dims, op, replace_given, to_ints
from whet.ops._types import broadcast


def infer(layer):
    x, shape = layer.inputs[0], find_given_dims(layer, "shape", 1)
    if shape is None:
        raise NetworkError("needs a shape: input 1, or the attribute shape")
    return x.type.with_shape(broadcast(x.shape, shape))


def compute_reference(layer, x, shape=None):
    shape = to_ints(layer.attrs.get("shape", shape))
    return np.broadcast_to(x, np.broadcast_shapes(x.shape, tuple(shape)))


def list_couples(layer):
    """Couples the axes that are not broadcast."""
    x, y = layer.inputs[0], layer.output
    lead = y.type.rank - x.type.rank
    own = [i for i in range(y.type.rank) if i < lead or x.shape[i - lead] == 1]
    return [Couple(x, i - lead, y, i) for i in range(y.type.rank) if i not in own] + [Couple(y, i, y, i) for i in own]


def recut(layer, kept_indices):
    y, shape = layer.output, list(find_given_dims(layer, "shape", 1))
    lead, changed = y.type.rank - len(shape), False
    for (t, axis), at in kept_indices.items():
        if t is y and axis >= lead and shape[axis - lead] != 1:
            shape[axis - lead], changed = len(at), True
    return replace_given(layer, "shape", 1, shape) if changed else {}


op(
    "Expand",
    infer,
    compute_reference,
    attrs={"shape": INTS},
    couples=list_couples,
    zeros=(),
    recut=recut,
    shape_value=lambda layer: fold_dims(layer, 1),
    to_onnx=make_attribute_exporter("shape"),
    samples=[
        (["f32[1,16,1,1]", np.array([1, 16, 5, 7])], {}),
        (["f32[3,1]", np.array([2, 1, 6])], {}),
        (["extreme f32[13]", np.array([1])], {}),
        (["f32[1,1,4]"], {"shape": (2, 3, 4)}),
        (["f32[]", np.array([2, 2])], {}),
        (["bool[1,3]", np.array([2, 1])], {}),
    ],
)
