"""Compress: the entries that a mask selects. A known mask becomes a Gather; else the output shape depends on the data."""

import numpy as np

from whet.ops._base import known_array
from whet.ops._refused import read_as_others

_REASON = "its output size depends on the data, but an engine needs shapes in advance; export with a mask (Where, Mul) instead"


def read(node, g):
    x, mask = node.inputs
    known = mask.array() if mask.is_constant else known_array(mask)
    if known is None or known.dtype == object:
        raise node.unsupported(_REASON)
    axis = node.attrs.get("axis")
    if axis is None:
        x, axis = g.add("Reshape", x, shape=(-1,), name=f"{node.name}_flat", sources=(node.name,)), 0
    return node.add(g, "Gather", x, g.constant(np.flatnonzero(known).astype(np.int64), f"{node.name}.selected"), axis=axis)


read_as_others("Compress", read, "Gather")
