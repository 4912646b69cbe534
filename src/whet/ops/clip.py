"""Clip: y = min(max, max(x, min)); NaN stays NaN. Bounds are inputs 1 and 2 (scalars), both optional."""

import numpy as np

from whet.errors import NetworkError
from whet.network import maximum, minimum
from whet.ops._base import find_known_values, op
from whet.ops._types import list_same_axis_couples


def infer(layer):
    x = layer.inputs[0]
    for t in layer.inputs[1:]:
        if t is not None and (t.dtype != x.dtype or t.shape not in ((), (1,))):
            raise NetworkError(f"takes scalars of type {x.dtype} as bounds, not {t.type}")
    return x.type


def compute_reference(layer, x, low=None, high=None):
    if low is not None:
        x = np.maximum(x, low.reshape(()))
    return x if high is None else np.minimum(x, high.reshape(()))


def shape_value(layer):
    """Bounds of dims; None if a value is unknown."""
    values = find_known_values(layer.inputs[0])
    bounds = [None if t is None else find_known_values(t) for t in (layer.input(1), layer.input(2))]
    if values is None or any(t is not None and b is None for t, b in zip(layer.inputs[1:], bounds, strict=False)):
        return [None]
    low, high = (b and b[0] for b in bounds)
    values = values if low is None else tuple(maximum(v, low) for v in values)
    return [values if high is None else tuple(minimum(v, high) for v in values)]


def read(node, g):
    """Before opset 11 the bounds are attributes."""
    x = node.inputs[0]
    if node.opset >= 11:
        return node.add(g, "Clip", *node.inputs)
    kind = x.dtype.numpy
    bounds = [None if node.attrs.get(k) is None else g.constant(np.array(node.attrs[k], kind), f"{node.name}.{k}") for k in ("min", "max")]
    return node.add(g, "Clip", x, *bounds)


op(
    "Clip",
    infer,
    compute_reference,
    onnx=read,
    samples=[
        (["f32[2,3,4,5]", np.array(0, np.float32), np.array(6, np.float32)], {}),
        (["extreme f32[4,16]", np.array(-1, np.float32), np.array(1, np.float32)], {}),
        (["f32[3,17]", None, np.array(0.5, np.float32)], {}),
        (["f32[3,17]", np.array(-0.5, np.float32)], {}),
        (["f32[5]", np.array(2, np.float32), np.array(-2, np.float32)], {}),
        (["i64[5]", np.array(-1), np.array(2)], {}),
        (["f16[3,7]", np.array(0, np.float16), np.array(1, np.float16)], {}),
    ],
    couples=lambda layer: list_same_axis_couples(layer.inputs[0], layer.output),
    shape_value=shape_value,
    pointwise=True,
)
