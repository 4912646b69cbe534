"""Compress: the entries along `axis` (default: of the flattened input) that a mask selects. A known mask becomes a Gather."""

import numpy as np

from whet.errors import NetworkError
from whet.network import BOOL
from whet.ops._base import INT, find_known_array
from whet.ops._data_sized import make_size_symbol, register_data_sized_op
from whet.ops._types import normalize_axis


def infer(layer):
    x, mask = layer.inputs
    if mask.dtype != BOOL or mask.type.rank != 1:
        raise NetworkError(f"takes a bool vector as its mask, not {mask.type}")
    if layer.attrs.get("axis") is None:
        return x.type.with_shape((make_size_symbol(layer),))
    axis = normalize_axis(layer.attrs["axis"], x.type.rank)
    return x.type.with_shape((*x.shape[:axis], make_size_symbol(layer), *x.shape[axis + 1 :]))


def compute_reference(layer, x, mask):
    return np.take(x, np.flatnonzero(mask), axis=layer.attrs.get("axis"))


def read(node, g):
    x, mask = node.inputs
    known = mask.array() if mask.is_constant else find_known_array(mask)
    if known is None or known.dtype == object:
        return node.add(g, "Compress", x, mask, **node.attrs)
    axis = node.attrs.get("axis")
    if axis is None:
        x, axis = g.add("Reshape", x, shape=(-1,), name=f"{node.name}_flat", sources=(node.name,)), 0
    return node.add(g, "Gather", x, g.constant(np.flatnonzero(known).astype(np.int64), f"{node.name}.selected"), axis=axis)


register_data_sized_op(
    "Compress",
    infer,
    compute_reference,
    read,
    attrs={"axis": INT},
    samples=[
        (["f32[3,4]", "bool[3]"], {"axis": 0}),
        (["f32[3,4]", "bool[3]"], {"axis": -1}),
        (["i64[3,4]", "bool[10]"], {}),
    ],
)
