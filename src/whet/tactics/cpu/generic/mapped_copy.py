"""Layers that move elements without a look at them, of any type: DepthToSpace, Expand, Pad, Resize (nearest), Slice, SpaceToDepth, Tile, Transpose.

For coverage: otherwise NumPy computes it. oneDNN's types and formats are left to its own tactics where it has them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np

from whet.network import Layer, static_shape
from whet.network.formats import compute_strides
from whet.ops.pad import pad_amounts
from whet.ops.resize import list_resampled_axes, make_resampling
from whet.ops.slice import slice_ranges
from whet.tactics._base import tactic
from whet.tactics.cpu.generic._loops import Launch, Loops, LoopTactic, get_moved_type
from whet.tactics.cpu.generic._mapped_copy_ir import emit_mapped_copy_ir

_ONEDNN = ("f32", "bf16", "i32", "i8", "u8")
_WAYS = 8  # most sequences that are interleaved
_PARTS = 4096  # most parts of a row


@dataclass(frozen=True)
class Axis:
    """A loop over a part of the result's axis `target`, outermost first: the positions along the axis `source` that it adds (-1: no element)."""

    target: int
    source: int
    positions: np.ndarray


@tactic
class MappedCopy(LoopTactic):
    ops: tuple[str, ...] = ("DepthToSpace", "Expand", "Pad", "Resize", "Slice", "SpaceToDepth", "Tile", "Transpose")
    formats = ("linear", "nhwc")
    leaves_to_onednn = True  # slices and transposes of the types that oneDNN moves

    def list_reads(self, layer: Layer) -> tuple[int, ...]:
        return (0, 2) if layer.op == "Pad" else (0,)

    def refuses_types(self, layer: Layer) -> str | None:
        sizes = [t for i, t in enumerate(layer.inputs) if t is not None and i not in self.list_reads(layer)]
        if any(not t.is_constant and t.shape_value is None for t in sizes):
            return "its sizes are computed at run time"
        x = layer.needs(0)
        if get_moved_type(x.dtype) is None:
            return "moves elements of whole bytes"
        if layer.op == "Resize" and (layer.attrs["mode"] != "nearest" or layer.attrs["coordinate_transformation_mode"] == "tf_crop_and_resize"):
            return "computes weighted sums of elements"
        reverses = layer.op == "Slice" and any(step < 0 for _, _, step in slice_ranges(layer).values())
        is_moved = layer.op in ("Slice", "Transpose") and not reverses and not x.is_constant and x.dtype.name in _ONEDNN
        if is_moved and self.leaves_to_onednn:
            return f"oneDNN moves {x.dtype}"
        return None

    def describe(self, layer: Layer, form: str, inplace: bool) -> Loops | str:
        x, shape = layer.needs(0), static_shape(layer.outputs[0].shape)
        steps, own = compute_strides(form, static_shape(x.shape)), compute_strides(form, shape)
        axes = list_axes(layer)
        order = sorted(range(len(axes)), key=lambda i: (-own[axes[i].target], axes[i].target, i))
        terms = merge_terms([_compute_terms(axes[i], steps[axes[i].source] if steps else 0) for i in order])
        offset, terms = _split_offset(terms)
        filled = any((t < 0).any() for t in terms)
        ways = 0 if filled else _count_ways(terms)
        row = _describe_interleaved(terms) if ways else _describe_parts(terms[-1])
        if len(row) > 3 * _PARTS:
            return f"a row has more than {_PARTS} parts"
        outer = terms[: -2 if ways else -1]
        value = layer.input(2) if layer.op == "Pad" else None
        tables = [np.concatenate([*outer, np.array(row)]).astype(np.int64)]
        if filled and value is None:
            tables.append(np.zeros(1, x.dtype.numpy))
        element = get_moved_type(x.dtype)
        assert element is not None
        ir = emit_mapped_copy_ir(element, len(outer), "interleaved" if ways else "parts", ways, filled)
        fill = [("table", 1) if value is None else ("input", 2)] if filled else []
        rows = prod(len(t) for t in outer)
        width = prod(shape) // rows
        places = (("input", 0), ("table", 0), *fill, ("output", 0))
        launch = Launch("mapped_copy", ir, places, rows, (offset, width, *(len(t) for t in outer)), work=prod(shape))
        return Loops((launch,), tuple(tables))


def list_axes(layer: Layer) -> list[Axis]:
    """The loops of a layer with static shapes."""
    source, shape = static_shape(layer.needs(0).shape), static_shape(layer.outputs[0].shape)
    return _AXES[layer.op](layer, source, shape)


def _list_block_axes(layer: Layer, source: tuple[int, ...], shape: tuple[int, ...]) -> list[Axis]:
    """DepthToSpace and SpaceToDepth: the position in a block is a part of the channel axis of one tensor, and of the image axes of the other."""
    size, to_space = int(layer.attrs["blocksize"]), layer.op == "DepthToSpace"
    deep, flat = (source, shape) if to_space else (shape, source)
    channels, outermost = flat[1], layer.attrs["mode"] == "DCR"
    of_block = np.arange(size)
    step = channels if outermost else 1  # of the position in a block along the deep tensor's channels
    own = np.arange(channels) * (1 if outermost else size * size)
    if to_space:
        axes = [Axis(0, 0, np.arange(shape[0])), Axis(1, 1, own)]
        for axis, distance in ((2, size), (3, 1)):
            axes += [Axis(axis, axis, np.arange(deep[axis])), Axis(axis, 1, of_block * distance * step)]
        return axes
    blocks = [Axis(1, axis, of_block) for axis in (2, 3)]
    inner = [Axis(1, 1, np.arange(channels))]
    images = [Axis(axis, axis, np.arange(deep[axis]) * size) for axis in (2, 3)]
    return [Axis(0, 0, np.arange(shape[0])), *([*blocks, *inner] if outermost else [*inner, *blocks]), *images]


def _list_expand_axes(layer: Layer, source: tuple[int, ...], shape: tuple[int, ...]) -> list[Axis]:
    lead = len(shape) - len(source)
    axes = [Axis(k, 0, np.zeros(n, np.int64)) for k, n in enumerate(shape[:lead])]
    return axes + [
        Axis(lead + k, k, np.arange(n) if n == m else np.zeros(n, np.int64)) for k, (n, m) in enumerate(zip(shape[lead:], source, strict=True))
    ]


def _list_pad_axes(layer: Layer, source: tuple[int, ...], shape: tuple[int, ...]) -> list[Axis]:
    mode, axes = layer.attrs["mode"], []
    for k, (n, (before, after)) in enumerate(zip(source, pad_amounts(layer), strict=True)):
        kept = np.arange(n)[max(-before, 0) : n - max(-after, 0)]
        amounts = (max(before, 0), max(after, 0))
        axes.append(Axis(k, k, np.pad(kept, amounts, constant_values=-1) if mode == "constant" else np.pad(kept, amounts, mode=mode)))
    return axes


def _list_resize_axes(layer: Layer, source: tuple[int, ...], shape: tuple[int, ...]) -> list[Axis]:
    how = make_resampling(layer)
    taken = {axis: how.taps(source[axis], out, scale, region)[0][:, 0] for axis, out, scale, region in list_resampled_axes(layer)}
    return [Axis(k, k, taken.get(k, np.arange(n))) for k, n in enumerate(shape)]


def _list_slice_axes(layer: Layer, source: tuple[int, ...], shape: tuple[int, ...]) -> list[Axis]:
    ranges = slice_ranges(layer)
    return [Axis(k, k, r[0] + np.arange(n) * r[2] if (r := ranges.get(k)) else np.arange(n)) for k, n in enumerate(shape)]


def _list_tile_axes(layer: Layer, source: tuple[int, ...], shape: tuple[int, ...]) -> list[Axis]:
    axes = []
    for k, (n, m) in enumerate(zip(shape, source, strict=True)):
        axes += [Axis(k, k, np.zeros(n // m, np.int64)), Axis(k, k, np.arange(m))]
    return axes


def _list_transpose_axes(layer: Layer, source: tuple[int, ...], shape: tuple[int, ...]) -> list[Axis]:
    perm = layer.attrs.get("perm") or range(len(source))[::-1]
    return [Axis(k, p, np.arange(shape[k])) for k, p in enumerate(perm)]


_AXES: dict[str, Callable[[Layer, tuple[int, ...], tuple[int, ...]], list[Axis]]] = {
    "DepthToSpace": _list_block_axes, "Expand": _list_expand_axes, "Pad": _list_pad_axes, "Resize": _list_resize_axes, "Slice": _list_slice_axes,
    "SpaceToDepth": _list_block_axes, "Tile": _list_tile_axes, "Transpose": _list_transpose_axes,
}  # fmt: skip

_NONE = -(1 << 40)  # the term of an index without an element: less than minus every sum of other terms


def _compute_terms(axis: Axis, step: int) -> np.ndarray:
    return np.where(axis.positions < 0, _NONE, axis.positions * step).astype(np.int64)


def merge_terms(terms: Sequence[np.ndarray]) -> list[np.ndarray]:
    """The same sums with fewer axes: those of size 1 go into others, and neighbours that are one arithmetic sequence are merged."""
    constant = sum(int(t[0]) for t in terms if len(t) == 1)
    merged: list[np.ndarray] = []
    for t in (t for t in terms if len(t) > 1):
        step = _find_step(t)
        if merged and step is not None and _find_step(merged[-1]) == step * len(t):
            merged[-1] = (merged[-1][:, None] + t).reshape(-1)
        else:
            merged.append(t)
    if not merged:
        return [np.array([constant])]
    merged[0] = merged[0] + constant
    return merged


def _find_step(terms: np.ndarray) -> int | None:
    """The difference of adjacent terms if all are equal and none is missing."""
    steps = np.diff(terms)
    return int(steps[0]) if (steps == steps[0]).all() and terms.min() > _NONE // 2 else None


def _split_offset(terms: list[np.ndarray]) -> tuple[int, list[np.ndarray]]:
    """(the sum of the axes' least terms, the terms without them): a term that is there is not negative."""
    offset, shifted = 0, []
    for t in terms:
        there = t[t > _NONE // 2]
        least = int(there.min()) if len(there) else 0
        offset += least
        shifted.append(np.where(t > _NONE // 2, t - least, _NONE))
    return offset, shifted


def _count_ways(terms: list[np.ndarray]) -> int:
    """The length of the last axis if the two last axes are better computed as sequences in turn, otherwise 0."""
    if len(terms) < 2 or not 2 <= len(terms[-1]) <= _WAYS or len(terms[-2]) <= len(terms[-1]):
        return 0
    steps = [_find_step(t) for t in terms[-2:]]
    return len(terms[-1]) if None not in steps else 0


def _describe_interleaved(terms: list[np.ndarray]) -> list[int]:
    """The step of a sequence and the distance of sequences; both axes begin at their least term, or descend to it."""
    a, b = terms[-2:]
    return [int(a[1] - a[0]), int(b[1] - b[0]), int(a[0] + b[0])]


def _describe_parts(terms: np.ndarray) -> list[int]:
    """The number of parts of a row, then for each its length, first term and step: arithmetic sequences, as long as possible from the left."""
    parts: list[tuple[int, int, int]] = []
    begin = 0
    while begin < len(terms):
        end = begin + 1
        if end < len(terms):
            step = terms[end] - terms[begin]
            differs = np.flatnonzero(np.diff(terms[begin:]) != step)
            end = begin + (int(differs[0]) + 1 if len(differs) else len(terms) - begin)
            if end - begin == 2 and step not in (0, 1):
                end = begin + 1
        parts.append((end - begin, int(terms[begin]), int(terms[begin + 1] - terms[begin]) if end - begin > 1 else 1))
        begin = end
    return [len(parts), *(x for part in parts for x in part)]
