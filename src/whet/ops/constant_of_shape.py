"""ConstantOfShape: a tensor of the shape of input 0 (or attribute `shape`), filled with `value` of type `dtype`."""

import numpy as np

from whet.errors import NetworkError
from whet.network import BOOL, F32, I64, TensorType, get_dtype
from whet.ops._base import INTS, Couple, find_given_dims, op, replace_given, to_ints


def infer(layer):
    shape = find_given_dims(layer, "shape", 0)
    if shape is None or any(isinstance(d, int) and d < 0 for d in shape):
        raise NetworkError(f"needs a shape of non-negative numbers, not {shape}")
    return TensorType(layer.attrs["dtype"], shape)


def compute_reference(layer, shape=None):
    shape = layer.attrs.get("shape", shape)
    return np.full(to_ints(shape), layer.attrs["value"], layer.attrs["dtype"].numpy)


def shape_value(layer):
    shape, value = find_given_dims(layer, "shape", 0), layer.attrs["value"]
    if len(shape) > 1 or not all(isinstance(d, int) and d <= 64 for d in shape) or value != int(value):
        return [None]
    return [(int(value),) * (shape[0] if shape else 1)]


def read(node, g):
    value = node.attrs.get("value")
    if value is None:
        return node.add(g, "ConstantOfShape", node.inputs[0])
    return node.add(g, "ConstantOfShape", node.inputs[0], value=value.reshape(-1)[0].item(), dtype=get_dtype(value))


def recut(layer, kept_indices):
    shape = list(find_given_dims(layer, "shape", 0))
    for (_, axis), at in kept_indices.items():
        shape[axis] = len(at)
    return replace_given(layer, "shape", 0, shape)


def to_onnx(layer, w):
    """In ONNX the value is a tensor of one element."""
    value = np.array([layer.attrs["value"]], layer.attrs["dtype"].numpy)
    shape = layer.attrs.get("shape")
    source = w.name(layer.inputs[0]) if shape is None else w.dims(shape, f"{layer.name}.shape")
    w.node("ConstantOfShape", [source], [w.name(layer.output)], name=layer.name, value=value)


op(
    "ConstantOfShape",
    infer,
    compute_reference,
    attrs={"value": 0.0, "dtype": F32, "shape": INTS},
    couples=lambda layer: [Couple(layer.output, i, layer.output, i) for i, d in enumerate(layer.output.shape) if d != 0],
    recut=recut,
    shape_value=shape_value,
    onnx=read,
    to_onnx=to_onnx,
    samples=[
        ([np.array([2, 3])], {}),
        ([np.array([4])], {"value": 7, "dtype": I64}),
        ([np.array([2, 0])], {"value": 1.5, "dtype": F32}),
        ([np.array([3])], {"value": True, "dtype": BOOL}),
        ([], {"shape": (2, 2)}),
        ([np.array([], np.int64)], {}),
    ],
)
