"""Shared by Softmax, LogSoftmax and Hardmax: opset 13 normalizes one axis, older opsets all axes from it on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from whet.network import Layer, TensorType, product
from whet.ops._base import Couple, op
from whet.ops._types import normalize_axis, require_float_input


def infer(layer: Layer) -> TensorType:
    t = require_float_input(layer)
    normalize_axis(layer.attrs["axis"], t.rank)
    return t


def list_couples(layer: Layer) -> list[Couple]:
    """Couples all axes but the normalized one."""
    x, y = layer.needs(0), layer.output
    axis = normalize_axis(layer.attrs["axis"], y.type.rank)
    return [Couple(x, i, y, i) for i in range(y.type.rank) if i != axis]


def read(node, g):
    """Before opset 13 all axes from `axis` on are normalized jointly, which is equivalent if at most one of them is not 1."""
    x = node.inputs[0]
    axis = node.attrs.get("axis", -1 if node.opset >= 13 else 1)
    if node.opset >= 13:
        return node.add(g, node.op, x, axis=axis)
    axis = normalize_axis(axis, x.type.rank)
    if product(x.shape[axis + 1 :]) == 1:
        return node.add(g, node.op, x, axis=axis)
    long = [i for i in range(axis, x.type.rank) if x.shape[i] != 1]
    if len(long) == 1:
        return node.add(g, node.op, x, axis=long[0])
    flat = g.add(node.op, g.add("Flatten", x, axis=axis, name=f"{node.name}_rows"), axis=-1, name=f"{node.name}_flat", sources=(node.name,))
    return node.add(g, "Reshape", flat, g.add("Shape", x, name=f"{node.name}_shape"))


def register_softmax_like(name: str, f: Callable[[np.ndarray, int], Any]):
    """Registers y = f(x, axis)."""
    samples = [
        (["f32[2,8]"], {"axis": 1}),
        (["f32[3,4,5]"], {"axis": 0}),
        (["f32[2,3,5,17]"], {}),
        (["f32[2,21,3,4]"], {"axis": 1}),
        (["extreme f32[12,16]"], {}),
        (["f16[3,7]"], {}),
    ]
    return op(name, infer, lambda layer, x: f(x, layer.attrs["axis"]), attrs={"axis": -1}, couples=list_couples, onnx=read, samples=samples)
