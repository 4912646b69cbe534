"""Shared by ArgMax and ArgMin."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from whet.network import I64, Layer, TensorType
from whet.ops._base import op
from whet.ops._reduce import list_kept_couples
from whet.ops._types import normalize_axis


def infer(layer: Layer) -> TensorType:
    x = layer.needs(0)
    axis = normalize_axis(layer.attrs["axis"], x.type.rank)
    kept = layer.attrs["keepdims"]
    return TensorType(I64, tuple(1 if i == axis else d for i, d in enumerate(x.shape) if kept or i != axis))


def register_arg(name: str, f: Callable[..., np.ndarray]):
    """Registers an op returning the index of f (np.argmax, np.argmin) along `axis`: the first of equal elements, or the last."""

    def compute_reference(layer, x):
        axis, keep = layer.attrs["axis"], bool(layer.attrs["keepdims"])
        if layer.attrs["select_last_index"]:
            return (x.shape[axis] - 1 - f(np.flip(x, axis), axis=axis, keepdims=keep)).astype(np.int64)
        return np.asarray(f(x, axis=axis, keepdims=keep)).astype(np.int64)

    return op(
        name,
        infer,
        compute_reference,
        attrs={"axis": 0, "keepdims": 1, "select_last_index": 0},
        couples=lambda layer: list_kept_couples(layer, (normalize_axis(layer.attrs["axis"], layer.inputs[0].type.rank),)),
        samples=[
            (["f32[2,3,4,5]"], {"axis": 1}),
            (["f32[3,17]"], {"axis": -1, "keepdims": 0}),
            (["i64[5,9]"], {"axis": 1, "select_last_index": 1}),
            (["i64[5,9]"], {}),
        ],
    )
