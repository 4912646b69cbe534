"""Data movement, selection and reshaping in PyTorch. Sizes come from the bound layer's static types."""

from __future__ import annotations

from typing import Literal

import numpy as np
import torch
from torch.nn import functional as F

from whet.errors import UnsupportedError
from whet.network import Layer, static_shape
from whet.ops import pad as _pad
from whet.ops import slice as _slice
from whet.ops._base import find_given_dims, find_given_ints
from whet.ops._running import get_running_axis
from whet.training.translate._base import Compute, Fixed, get_torch_dtype, torch_op


@torch_op("Reshape", "Flatten", "Squeeze", "Unsqueeze")
def _translate_reshape(layer: Layer) -> Compute:
    shape = tuple(layer.output.shape)
    return lambda x, *_: x.reshape(shape)


@torch_op("Expand")
def _translate_expand(layer: Layer) -> Compute:
    shape = tuple(layer.output.shape)
    return lambda x, *_: x.expand(shape)


@torch_op("Transpose")
def _translate_transpose(layer: Layer) -> Compute:
    perm = tuple(layer.attrs.get("perm") or reversed(range(layer.output.type.rank)))
    return lambda x: x.permute(perm)


@torch_op("Concat")
def _translate_concat(layer: Layer) -> Compute:
    axis = layer.attrs["axis"]
    return lambda *xs: torch.cat(xs, axis)


@torch_op("Split")
def _translate_split(layer: Layer) -> Compute:
    axis = layer.attrs["axis"]
    sizes = [t.shape[axis] for t in layer.outputs]
    return lambda x, *_: torch.split(x, sizes, axis)


@torch_op("Slice")
def _translate_slice(layer: Layer) -> Compute:
    found = _slice.slice_ranges(layer)
    where = [slice(None)] * layer.output.type.rank
    backward: dict[int, Fixed] = {}
    for axis, (start, length, step) in found.items():
        if step > 0:
            where[axis] = slice(start, start + (length - 1) * step + 1 if length else start, step)
        else:
            first = layer.needs(0).shape[axis] - 1 if start is None else start
            backward[axis] = Fixed(np.arange(length, dtype=np.int64) * step + first)

    def compute(x: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
        y = x[tuple(where)]
        for axis, at in backward.items():
            y = y.index_select(axis, at.like(x, dtype=False))
        return y

    return compute


@torch_op("Pad")
def _translate_pad(layer: Layer) -> Compute:
    both, mode, value = _pad.pad_amounts(layer), layer.attrs["mode"], layer.input(2)
    if not all(isinstance(v, int) for a in both for v in a):
        raise UnsupportedError(f"Pad '{layer.name}': its pads follow from a dynamic size. Give the input's size to train the network")
    around = [v for a in reversed(both) for v in a]
    if mode == "constant":
        fill = 0 if value is None else value.array().reshape(-1)[0].item()
        return lambda x, *_: F.pad(x, around, value=fill)
    modes: dict[str, Literal["reflect", "edge", "wrap"]] = {"reflect": "reflect", "edge": "edge", "wrap": "wrap"}
    numpy_mode = modes[mode]
    shape = layer.needs(0).shape
    taken: dict[int, Fixed] = {}
    for axis, (a, b) in enumerate(both):  # torch pads only some ranks this way, so padding is by index
        if (a, b) != (0, 0):
            at = np.arange(shape[axis])[max(-a, 0) : shape[axis] - max(-b, 0)]
            taken[axis] = Fixed(np.pad(at, (max(a, 0), max(b, 0)), mode=numpy_mode))

    def compute(x: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
        for axis, at in taken.items():
            x = x.index_select(axis, at.like(x, dtype=False))
        return x

    return compute


@torch_op("Gather")
def _translate_gather(layer: Layer) -> Compute:
    x = layer.needs(0)
    axis = layer.attrs["axis"] % x.type.rank
    n, shape = x.shape[axis], tuple(layer.output.shape)

    def compute(x: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        at = torch.where(at < 0, at + n, at).to(torch.int64)
        return x.index_select(axis, at.reshape(-1)).reshape(shape)

    return compute


@torch_op("GatherElements")
def _translate_gather_elements(layer: Layer) -> Compute:
    axis = layer.attrs["axis"]
    return lambda x, at: torch.gather(x, axis, torch.where(at < 0, at + x.shape[axis], at).to(torch.int64))


@torch_op("Tile")
def _translate_tile(layer: Layer) -> Compute:
    repeats = find_given_ints(layer, "repeats", 1)
    return lambda x, *_: x.repeat(repeats)


@torch_op("Shape")
def _translate_shape(layer: Layer) -> Compute:
    raise UnsupportedError(f"the network cannot be trained: Shape '{layer.name}' reads a shape that is known only at run time")


@torch_op("ConstantOfShape")
def _translate_constant_of_shape(layer: Layer) -> Compute:
    shape, value, dtype = tuple(layer.output.shape), layer.attrs["value"], get_torch_dtype(layer.output.dtype)
    made = Fixed(np.full(shape, value, layer.output.dtype.numpy))
    return lambda *xs: made.like(xs[0], dtype=False) if xs else torch.full(shape, value, dtype=dtype)


@torch_op("CumSum")
def _translate_cumsum(layer: Layer) -> Compute:
    axis, exclusive, reverse = get_running_axis(layer), layer.attrs["exclusive"], layer.attrs["reverse"]

    def compute(x: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
        y = x.flip(axis) if reverse else x
        y = y.cumsum(axis).to(x.dtype) - y if exclusive else y.cumsum(axis).to(x.dtype)
        return y.flip(axis) if reverse else y

    return compute


@torch_op("Trilu")
def _translate_trilu(layer: Layer) -> Compute:
    k = find_given_ints(layer, "k", 1)
    at = 0 if k is None else k[0]
    f = torch.triu if layer.attrs["upper"] else torch.tril
    return lambda x, *_: f(x, at)


@torch_op("TopK")
def _translate_top_k(layer: Layer) -> Compute:
    axis, largest, k = layer.attrs["axis"], bool(layer.attrs["largest"]), find_given_dims(layer, "k", 1)
    assert k is not None
    (count,) = static_shape(k)

    def compute(x: torch.Tensor, *_: torch.Tensor):
        values, places = torch.sort(x, dim=axis, descending=largest, stable=True)
        return values.narrow(axis, 0, count), places.narrow(axis, 0, count)

    return compute


@torch_op("OneHot")
def _translate_one_hot(layer: Layer) -> Compute:
    axis = layer.attrs["axis"] % layer.output.type.rank
    depth = int(layer.output.shape[axis])
    column = [1] * layer.output.type.rank
    column[axis] = depth

    def compute(at: torch.Tensor, _: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        at = at.to(torch.int64)
        at = torch.where(at < 0, at + depth, at).unsqueeze(axis)
        return torch.where(at == torch.arange(depth, device=at.device).reshape(column), values[1], values[0])

    return compute


@torch_op("DepthToSpace")
def _translate_depth_to_space(layer: Layer) -> Compute:
    s, mode = layer.attrs["blocksize"], layer.attrs["mode"]
    n, c, h, w = layer.needs(0).shape
    if mode == "CRD":
        return lambda x: F.pixel_shuffle(x, s)
    small = c // (s * s)
    return lambda x: x.reshape(n, s, s, small, h, w).permute(0, 3, 4, 1, 5, 2).reshape(n, small, h * s, w * s)


@torch_op("SpaceToDepth")
def _translate_space_to_depth(layer: Layer) -> Compute:
    s = layer.attrs["blocksize"]
    n, c, h, w = layer.needs(0).shape
    order = (0, 3, 5, 1, 2, 4) if layer.attrs["mode"] == "DCR" else (0, 1, 3, 5, 2, 4)
    return lambda x: x.reshape(n, c, h // s, s, w // s, s).permute(order).reshape(n, c * s * s, h // s, w // s)


