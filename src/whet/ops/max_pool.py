"""MaxPool: the maximum of each window; padding is ignored, NaN propagates."""

from math import prod

import numpy as np

from whet.ops._base import op
from whet.ops._window import POOL_ATTRS, infer_pool, pool_couples, pool_of, read_pool

_MOST_TAPS = 1 << 24  # entries of all windows of a plane, as a constant of indices


def compute_reference(layer, x):
    if x.dtype.itemsize == 1 and x.dtype.kind not in "iu":  # float8 e4m3 has no infinity to pad with
        return compute_reference(layer, x.astype(np.float32)).astype(x.dtype)
    lowest = -np.inf if x.dtype.kind == "f" else np.iinfo(x.dtype).min
    parts = pool_of(layer).slices(x, lowest)
    y = next(parts).copy()
    for part in parts:
        np.maximum(y, part, out=y)
    return y


def read(node, g):
    y = read_pool(node, g)
    return (y, _add_indices(node, g, y)) if any(node.outputs[1:]) else y


def _add_indices(node, g, y):
    """Flat indices into x of the maxima: the windows are gathered from the flat planes, padding being the lowest value, then ArgMax."""
    x, pool = node.inputs[0], pool_of(y.maker)
    spatial, out = x.shape[2:], y.shape[2:]
    if not all(isinstance(d, int) for d in (*x.shape[1:], *out)):
        raise node.unsupported("its indices need static sizes of all axes but the batch. Give fixed shapes")
    size, taps, windows = prod(spatial), prod(pool.kernel), prod(out)
    if windows * taps > _MOST_TAPS:
        raise node.unsupported(f"its indices are selected among {windows * taps} taps; the most are {_MOST_TAPS}")

    def add(op, *inputs, **attrs):
        return g.add(op, *inputs, name=f"{node.name}_{op.lower()}", sources=(node.name,), **attrs)

    places = np.arange(1, size + 1).reshape(1, 1, *spatial)  # 0 for padding
    at = np.stack(list(pool.slices(places, 0)), -1).reshape(windows * taps) - 1
    lowest = np.array(-np.inf if x.dtype.kind == "float" else np.iinfo(x.dtype.numpy).min, x.dtype.numpy)
    planes = add("Reshape", x, shape=(-1, size))
    ends = add("Expand", g.constant(lowest, f"{node.name}.lowest"), shape=(planes.shape[0], 1))
    chosen = add("Gather", add("Concat", planes, ends, axis=1), g.constant(np.where(at < 0, size, at), f"{node.name}.taps"), axis=1)
    taken = add("ArgMax", add("Reshape", chosen, shape=(-1, windows, taps)), axis=2, keepdims=0)
    order = np.arange(size)
    if node.attrs.get("storage_order", 0):  # by columns: the first spatial axis is the fastest
        order = order.reshape(spatial[::-1]).transpose().reshape(-1)
    table = g.constant(np.where(at < 0, 0, order[at]), f"{node.name}.table")
    starts = g.constant(np.arange(windows) * taps, f"{node.name}.starts")
    inside = add("Gather", table, add("Add", taken, starts), axis=0)
    counted = add("CumSum", add("Expand", g.constant(np.array(size), f"{node.name}.size"), shape=(planes.shape[0],)), axis=(0,), exclusive=1)
    flat = add("Add", inside, add("Unsqueeze", counted, axes=(1,)))
    return add("Reshape", flat, shape=y.shape)


op(
    "MaxPool",
    infer_pool,
    compute_reference,
    attrs=POOL_ATTRS,
    couples=pool_couples,
    zeros=(),
    onnx=read,
    samples=[
        (["f32[2,3,9,9]"], {"kernel_shape": (3, 3), "strides": (2, 2), "pads": (1, 1, 1, 1)}),
        (["f32[1,17,8,8]"], {"kernel_shape": (2, 2), "strides": (2, 2)}),
        (["f32[1,4,7,10]"], {"kernel_shape": (3, 2), "strides": (2, 3), "ceil_mode": 1}),
        (["f32[1,4,9,9]"], {"kernel_shape": (3, 3), "strides": (2, 2), "pads": (0, 0, 1, 1), "ceil_mode": 1}),
        (["f32[1,4,10]"], {"kernel_shape": (3,), "dilations": (2,)}),
        (["f32[1,2,5,6,7]"], {"kernel_shape": (2, 3, 2), "strides": (1, 2, 2)}),
        (["f32[1,8,6,6]"], {"kernel_shape": (5, 5), "pads": (2, 2, 2, 2)}),
        (["extreme f32[1,16,4,4]"], {"kernel_shape": (2, 2), "strides": (2, 2)}),
        (["i8[1,3,4,4]"], {"kernel_shape": (2, 2)}),
        (["f32[1,2,5,5]"], {"kernel_shape": (2, 2), "strides": (3, 3), "pads": (0, 0, 1, 1), "ceil_mode": 1}),
    ],
)
