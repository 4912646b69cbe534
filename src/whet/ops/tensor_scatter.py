"""TensorScatter: writes an update into a copy of a cache [N, ...] along `axis`, per sample from `write_indices` [N] on (opset 24).

`mode` "circular" wraps around the end of the cache.
"""

import numpy as np

from whet.errors import NetworkError
from whet.ops._axes import needs_opset
from whet.ops._base import op
from whet.ops._types import may_equal, normalize_axis


def infer(layer):
    cache, update, start = layer.needs(0), layer.needs(1), layer.input(2)
    axis = normalize_axis(layer.attrs["axis"], cache.type.rank)
    rest = [tuple(d for i, d in enumerate(t.shape) if i != axis) for t in (cache, update)]
    if axis == 0 or cache.dtype != update.dtype or len(rest[0]) != len(rest[1]) or not may_equal(*rest):
        raise NetworkError(f"an update {update.type} does not fit the cache {cache.type} along axis {axis}")
    if layer.attrs["mode"] not in ("linear", "circular") or (start is not None and not may_equal(start.shape, cache.shape[:1])):
        raise NetworkError(f"mode is 'linear' or 'circular', and the write indices are [N], not {layer.attrs['mode']!r} and {start and start.type}")
    return cache.type


def compute_reference(layer, cache, update, start=None):
    axis = layer.attrs["axis"] % cache.ndim
    y, size, count = np.array(cache), cache.shape[axis], update.shape[axis]
    rows = np.moveaxis(y, axis, 1)
    for i, values in enumerate(np.moveaxis(update, axis, 1)):
        at = (0 if start is None else int(start[i])) + np.arange(count)
        rows[i, at % size if layer.attrs["mode"] == "circular" else at] = values
    return y


def to_onnx(layer, w):
    needs_opset(layer, w, 24, "TensorScatter")
    w.node("TensorScatter", [w.name(t) for t in layer.inputs], [w.name(layer.output)], name=layer.name, **layer.attrs)


op(
    "TensorScatter",
    infer,
    compute_reference,
    attrs={"axis": -2, "mode": "linear"},
    to_onnx=to_onnx,
    samples=[
        (["f32[2,3,8,5]", "f32[2,3,2,5]", np.array([1, 6])], {}),
        (["f32[2,8,5]", "f32[2,3,5]", np.array([7, 0])], {"axis": 1, "mode": "circular"}),
        (["f32[2,8,5]", "f32[2,3,5]"], {"axis": 1}),
    ],
)
