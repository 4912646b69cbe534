"""Conv: convolution of x [N, C, *spatial] with w [K, C/group, *kernel], plus a bias [K].

`pads` is (begin..., end...); `auto_pad` is resolved by the reader.
"""

import numpy as np

from whet.errors import NetworkError, UnsupportedError
from whet.network import Layer, TensorType, static_shape
from whet.ops._base import INTS, Couple, op
from whet.ops._products import Window, convolve_elsewhere, get_accumulator_dtype, round_accumulator
from whet.ops._types import may_equal, require_one_float_type
from whet.ops._window import check_window, compute_out_size, gather_windows, resolve_auto_pad

MOST_COLUMNS = 1 << 22  # values of windows that are copied at once
_BLOCK = 1 << 14  # results of a depthwise convolution that are summed at once


def get_window_attributes(layer: Layer) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """strides, dilations, pads with defaults filled in."""
    r = layer.needs(1).type.rank - 2
    a = layer.attrs
    return tuple(a.get("strides") or (1,) * r), tuple(a.get("dilations") or (1,) * r), tuple(a.get("pads") or (0,) * 2 * r)


def infer(layer: Layer) -> TensorType:
    x, w = layer.needs(0), layer.needs(1)
    r, group = w.type.rank - 2, layer.attrs["group"]
    strides, dilations, pads = get_window_attributes(layer)
    require_one_float_type(layer, 1, 2)
    if group < 1:
        raise NetworkError(f"Conv '{layer.name}': group is {group}; it starts at 1")
    if x.type.rank != r + 2 or r < 1:
        raise NetworkError(f"Conv '{layer.name}': x is of rank {x.type.rank}, w of rank {w.type.rank}")
    if len(strides) != r or len(dilations) != r or len(pads) != 2 * r or min(pads) < 0:
        raise NetworkError(f"Conv '{layer.name}': strides {strides}, dilations {dilations}, pads {pads} do not match {r} spatial axes")
    if not may_equal((x.shape[1],), (w.shape[1] * group,)):
        raise NetworkError(f"Conv '{layer.name}': x has {x.shape[1]} channels, w takes {w.shape[1]} in {group} group(s)")
    if isinstance(w.shape[0], int) and w.shape[0] % group:
        raise NetworkError(f"Conv '{layer.name}': {w.shape[0]} output channels are not divisible into {group} groups")
    if not all(isinstance(d, int) for d in w.shape[2:]):
        raise UnsupportedError(f"Conv '{layer.name}': the window of w {w.type} is known only at run time; its sizes must be constants")
    if layer.attrs.get("kernel_shape") and tuple(layer.attrs["kernel_shape"]) != tuple(w.shape[2:]):
        raise NetworkError(f"Conv '{layer.name}': kernel_shape {layer.attrs['kernel_shape']} does not match w {w.type}")
    b = layer.input(2)
    if b is not None and not may_equal(b.shape, (w.shape[0],)):
        raise NetworkError(f"Conv '{layer.name}': the bias is {b.type}, w makes {w.shape[0]} channels")
    check_window(w.shape[2:], x.shape, (*x.shape[:2], *(x.shape[2 + i] + pads[i] + pads[r + i] for i in range(r))))
    out = [compute_out_size(x.shape[2 + i], w.shape[2 + i], strides[i], dilations[i], pads[i], pads[r + i]) for i in range(r)]
    return TensorType(x.dtype, (x.shape[0], w.shape[0], *out))


def compute_reference(layer: Layer, x, w, b=None):
    strides, dilations, pads = get_window_attributes(layer)
    group, r = layer.attrs["group"], w.ndim - 2
    out = static_shape(tuple(compute_out_size(x.shape[2 + i], w.shape[2 + i], strides[i], dilations[i], pads[i], pads[r + i]) for i in range(r)))
    y = convolve_elsewhere(x, w, Window(out, strides, dilations, pads[:r], group))
    if y is None:
        v, dtype = gather_windows(x, w.shape[2:], strides, dilations, pads, 0), get_accumulator_dtype(x.dtype)
        depthwise = w.shape[1] == 1 and len(w) == group
        y = _compute_depthwise(v, w, out, dtype) if depthwise else _multiply_windows(v, w, group, dtype)
    return round_accumulator(y if b is None else y + b.reshape(1, -1, *(1,) * r), x.dtype)


def _multiply_windows(v, w, group, dtype):
    """Sums [N, K, out...] of windows v [N, C, out..., kernel...] times weights, a block of the first output axis at a time if the columns are large:
    all of them at once would be gigabytes for a volume, most of the time of whose reference is writing them."""
    n, out, first = v.shape[0], v.shape[2 : w.ndim], v.shape[2]
    if v.size <= MOST_COLUMNS:
        return _multiply_columns(v, w, group, dtype).reshape(n, len(w), *out)
    y = np.empty((n, len(w), *out), dtype)
    rows = max(1, MOST_COLUMNS // (v[0].size // first))
    for image, start in np.ndindex(n, -(-first // rows)):
        part = slice(start * rows, (start + 1) * rows)
        y[image, :, part] = _multiply_columns(v[image : image + 1, :, part], w, group, dtype).reshape(len(w), -1, *out[1:])
    return y


def _multiply_columns(v, w, group, dtype):
    """w [group, K / group, per * kernel] times the columns [N, group, per * kernel, outputs] of windows v; `dtype` is the accumulators'."""
    n, per, r = v.shape[0], w.shape[1], w.ndim - 2
    columns = v.reshape(n, group, per, *v.shape[2:]).transpose(0, 1, 2, *range(3 + r, 3 + 2 * r), *range(3, 3 + r))
    columns = columns.reshape(n, group, per * int(np.prod(w.shape[2:])), int(np.prod(v.shape[2 : 2 + r])))
    return np.matmul(w.reshape(group, len(w) // group, -1).astype(dtype, copy=False), columns.astype(dtype, copy=False))


def _compute_depthwise(v, w, out, dtype):
    """A sum over the window's taps, no products between channels; a block of channels at a time, which stays in the cache."""
    n, k = v.shape[:2]
    y = np.zeros((n, k, *out), dtype)
    taps = w.astype(dtype)
    step = max(1, _BLOCK // max(int(np.prod(out)), 1))
    for image, start in np.ndindex(n, -(-k // step)):
        part = slice(start * step, (start + 1) * step)
        sums, values = y[image, part], v[image, part]
        product = np.empty_like(sums)
        for at in np.ndindex(*w.shape[2:]):
            np.multiply(values[(..., *at)], taps[(part, 0, *at)].reshape(-1, *(1,) * len(out)), out=product)
            sums += product
    return y


def list_couples(layer: Layer) -> list[Couple]:
    """One group: input channels couple x and w, output channels couple w, b and y. Several groups: a group is pruned as one unit."""
    x, w, b, y = layer.needs(0), layer.needs(1), layer.input(2), layer.output
    group = layer.attrs["group"]
    tied = [Couple(x, 0, y, 0)]
    if group == 1:
        tied += [Couple(x, 1, w, 1, summed=True), Couple(w, 0, y, 1)]
        return tied if b is None else [*tied, Couple(b, 0, y, 1)]
    ins, outs = w.shape[1], w.shape[0] // group
    tied += [Couple(x, 1, w, 0, a_block=ins, b_block=outs, count=group), Couple(w, 0, y, 1, a_block=outs, b_block=outs, count=group)]
    return tied if b is None else [*tied, Couple(b, 0, y, 1, a_block=outs, b_block=outs, count=group)]


def couple_in_groups(layer: Layer, level: int) -> list[Couple]:
    """Several groups of several channels, level 0: each group loses the channels of the same indices."""
    x, w, b, y = layer.needs(0), layer.needs(1), layer.input(2), layer.output
    group, ins = layer.attrs["group"], w.shape[1]
    if level or group == 1 or ins == 1 or not isinstance(w.shape[0], int):
        return list_couples(layer)
    within = {"a_repeat": group, "b_repeat": group, "count": w.shape[0] // group}
    tied = [Couple(x, 0, y, 0), Couple(x, 1, w, 1, a_repeat=group, count=ins, summed=True), Couple(w, 0, y, 1, **within)]
    return tied if b is None else [*tied, Couple(b, 0, y, 1, **within)]


def recut(layer: Layer, kept_indices):
    """Updates the number of groups."""
    x, w, group = layer.inputs[0], layer.needs(1), layer.attrs["group"]
    if group == 1 or (x, 1) not in kept_indices:
        return {}
    return {"group": len(kept_indices[x, 1]) // (len(kept_indices[w, 1]) if (w, 1) in kept_indices else w.shape[1])}


def read(node, g):
    """ONNX Conv; auto_pad becomes explicit pads."""
    x, w = node.inputs[0], node.inputs[1]
    return node.add(g, "Conv", *node.inputs, **resolve_auto_pad(node, x.shape[2:], w.shape[2:]))


op(
    "Conv",
    infer,
    compute_reference,
    attrs={"group": 1, "strides": INTS, "dilations": INTS, "pads": INTS, "kernel_shape": INTS},
    couples=list_couples,
    zeros=(2,),
    inner=couple_in_groups,
    recut=recut,
    onnx=read,
    samples=[
        (["f32[2,3,9,9]", "const f32[8,3,3,3]", "const f32[8]"], {"strides": (2, 2), "pads": (1, 1, 1, 1)}),
        (["f32[1,16,8,8]", "const f32[32,16,3,3]", None], {"pads": (1, 1, 1, 1)}),
        (["f32[1,16,7,7]", "const f32[16,1,3,3]", "const f32[16]"], {"group": 16, "pads": (1, 1, 1, 1)}),
        (["f32[2,32,7,7]", "const f32[64,32,1,1]", "const f32[64]"], {}),
        (["f32[1,8,10,10]", "const f32[6,4,3,3]", None], {"group": 2, "dilations": (2, 2)}),
        (["f32[1,4,6,5]", "const f32[5,4,2,3]", "const f32[5]"], {"pads": (0, 1, 1, 1)}),
        (["f32[1,4,12]", "const f32[6,4,3]", "const f32[6]"], {"strides": (2,), "pads": (1, 1)}),
        (["f32[1,17,5,5]", "const f32[19,17,3,3]", "const f32[19]"], {"pads": (1, 1, 1, 1)}),
        (["nonfinite f32[1,16,6,6]", "const f32[16,16,1,1]", None], {}),
        (["f32[2,6,7,7]", "const f32[12,1,3,3]", "const f32[12]"], {"group": 6, "strides": (2, 2)}),
        (["f32[2,32,9,7]", "const f32[64,8,3,3]", "const f32[64]"], {"group": 4, "pads": (1, 1, 1, 1), "strides": (2, 1)}),
        (["f32[1,80,6,6]", "const f32[80,40,3,3]", "const f32[80]"], {"group": 2, "pads": (1, 1, 1, 1)}),
        (["f32[2,3,24,33]", "const f32[16,3,8,8]", "const f32[16]"], {"strides": (8, 8), "pads": (0, 1, 0, 2)}),
        (["f32[2,3,18,36]", "const f32[24,3,6,6]", "const f32[24]"], {"strides": (2, 2), "pads": (2, 2, 2, 2)}),
        (["f32[1,3,4,5,6]", "const f32[4,3,2,2,2]", "const f32[4]"], {"strides": (1, 2, 2)}),
        (["f32[2,16,8,8]", "f32[32,16,3,3]", "f32[32]"], {"pads": (1, 1, 1, 1)}),
        (["f32[1,8,10,9]", "f32[6,4,3,3]", None], {"group": 2, "strides": (2, 1)}),
    ],
)
