"""TopK: the k largest (or smallest) entries along `axis`, in order, and their indices; ties keep their order."""

import numpy as np

from whet.errors import NetworkError
from whet.network import I64
from whet.ops._axes import convert_attributes_to_inputs, make_attribute_exporter
from whet.ops._base import INTS, Couple, find_given_dims, op
from whet.ops._types import normalize_axis


def infer(layer):
    x, k = layer.inputs[0], find_given_dims(layer, "k", 1)
    axis = normalize_axis(layer.attrs["axis"], x.type.rank)
    if k is None or len(k) != 1:
        raise NetworkError(f"TopK '{layer.name}' needs one value k, not {k}")
    n = x.shape[axis]
    if all(isinstance(v, int) for v in (n, k[0])) and not 0 <= k[0] <= n:
        raise NetworkError(f"TopK '{layer.name}': k is {k[0]}, axis {axis} has {n} entries")
    shape = (*x.shape[:axis], k[0], *x.shape[axis + 1 :])
    return [x.type.with_shape(shape), x.type.with_shape(shape).with_dtype(I64)]


def compute_reference(layer, x, k=None):
    axis = layer.attrs["axis"]
    k = int(np.reshape(layer.attrs.get("k", k), ()))
    if layer.attrs["largest"]:  # stable from the back, so that ties keep their order
        order = x.shape[axis] - 1 - np.flip(np.argsort(np.flip(x, axis), axis=axis, kind="stable"), axis)
    else:
        order = np.argsort(x, axis=axis, kind="stable")
    order = np.take(order, np.arange(k), axis=axis)
    return np.take_along_axis(x, order, axis), order.astype(np.int64)


def list_couples(layer):
    x = layer.inputs[0]
    axis = normalize_axis(layer.attrs["axis"], x.type.rank)
    return [Couple(x, i, y, i) for y in layer.outputs for i in range(x.type.rank) if i != axis]


def read(node, g):
    """k was an attribute before opset 10."""
    if node.opset >= 10:
        return node.add(g, "TopK", *node.inputs, **node.attrs)
    node.attrs["k"] = (node.attrs["k"],)
    inputs = convert_attributes_to_inputs(node, g, ["k"])
    return node.add(g, "TopK", *inputs, axis=node.attrs.get("axis", -1))


op(
    "TopK",
    infer,
    compute_reference,
    attrs={"axis": -1, "largest": 1, "sorted": 1, "k": INTS},
    couples=list_couples,
    onnx=read,
    to_onnx=make_attribute_exporter("k"),
    samples=[
        (["f32[3,17]", np.array([5])], {}),
        (["f32[7,4]", np.array([3])], {"axis": 0, "largest": 0}),
        (["i64[3,9]", np.array([4])], {}),
        (["i64[3,9]", np.array([4])], {"largest": 0}),
        (["f32[2,5,3]"], {"k": (2,), "axis": 1}),
    ],
)
