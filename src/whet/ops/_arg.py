"""Shared by ArgMax and ArgMin."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from whet.network import I64, Layer, TensorType
from whet.ops._base import op
from whet.ops._reduce import kept_couples
from whet.ops._types import axis_of


def infer(layer: Layer) -> TensorType:
    x = layer.needs(0)
    axis = axis_of(layer.attrs["axis"], x.type.rank)
    kept = layer.attrs["keepdims"]
    return TensorType(I64, tuple(1 if i == axis else d for i, d in enumerate(x.shape) if kept or i != axis))


def arg(name: str, f: Callable[..., np.ndarray]):
    """Registers an op returning the index of f (np.argmax, np.argmin) along `axis`: the first of equal elements, or the last."""

    def reference(layer, x):
        axis, keep = layer.attrs["axis"], bool(layer.attrs["keepdims"])
        if layer.attrs["select_last_index"]:
            return (x.shape[axis] - 1 - f(np.flip(x, axis), axis=axis, keepdims=keep)).astype(np.int64)
        return np.asarray(f(x, axis=axis, keepdims=keep)).astype(np.int64)

    return op(
        name,
        infer,
        reference,
        attrs={"axis": 0, "keepdims": 1, "select_last_index": 0},
        couples=lambda layer: kept_couples(layer, (axis_of(layer.attrs["axis"], layer.inputs[0].type.rank),)),
        samples=[
            (["f32[2,3,4,5]"], {"axis": 1}),
            (["f32[3,17]"], {"axis": -1, "keepdims": 0}),
            (["i64[5,9]"], {"axis": 1, "select_last_index": 1}),
            (["i64[5,9]"], {}),
        ],
    )
