"""Layers that move no data as strides: a tensor as a view of another one, after Transpose, Slice, Split, Expand, Reshape and others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import prod
from typing import Any

import numpy as np

from whet.network import Layer, Tensor
from whet.ops._axes import RESHAPES as RESHAPES
from whet.ops.slice import slice_ranges
from whet.ops.split import list_part_sizes

REARRANGING = ("Expand", "Gather", *RESHAPES, "Slice", "Split", "Tile", "Transpose")


@dataclass(frozen=True)
class View:
    """A tensor of the body as a view of an input (or the output) of the layer: shape, strides and offset in elements."""

    place: int
    shape: tuple[Any, ...]
    strides: tuple[Any, ...]
    offset: Any = 0
    group: int = 1  # consecutive heads that read the same head of the input (grouped-query attention)
    period: int = 0  # the first axis repeats after this many items (a mask per window); 0: it does not repeat

    def transpose(self, perm: Sequence[int]) -> View:
        """The view after a Transpose."""
        return replace(self, shape=tuple(self.shape[i] for i in perm), strides=tuple(self.strides[i] for i in perm))

    def take(self, axis: int, index: int) -> View:
        """The view after a Gather of one index, which drops the axis."""
        axis, index = axis % len(self.shape), index % self.shape[axis]
        kept = [i for i in range(len(self.shape)) if i != axis]
        return replace(self.transpose(kept), offset=self.offset + index * self.strides[axis])

    def cut(self, axis: int, start: Any, count: Any) -> View:
        """The view of `count` items of an axis from `start` on."""
        shape = (*self.shape[:axis], count, *self.shape[axis + 1 :])
        return replace(self, shape=shape, offset=self.offset + start * self.strides[axis])

    def leading(self, batch: int, heads: int) -> tuple[int, int] | None:
        """Strides of batch and head; 0 for a broadcast axis. None for other leading axes, or where heads share one head of the input."""
        return self.steps() if self.group == 1 and self.fits(batch, heads) else None

    def fits(self, batch: int, heads: int) -> bool:
        """True if the leading axes are batch and heads, each whole or broadcast."""
        return len(self.shape) <= 4 and all(d in (1, n) for d, n in zip((1, 1, *self.shape[:-2])[-2:], (batch, heads), strict=True))

    def steps(self) -> tuple[int, int]:
        """Strides of batch and of a head of the input; 0 for a broadcast axis."""
        shape, strides = (1, 1, *self.shape[:-2])[-2:], (0, 0, *self.strides[:-2])[-2:]
        return strides[0] if shape[0] > 1 else 0, strides[1] if shape[1] > 1 else 0

    @property
    def batches(self) -> int:
        """Batch items of the input."""
        return (1, 1, *self.shape)[-4]

    @property
    def heads(self) -> int:
        """Heads of the input."""
        return (1, 1, *self.shape)[-3] // self.group

    def swap_last_axes(self) -> View:
        """The view with the last two axes exchanged."""
        return self.transpose((*range(len(self.shape) - 2), len(self.shape) - 1, len(self.shape) - 2))

    def insert_axes(self, axes: Sequence[int]) -> View:
        """The view after an Unsqueeze."""
        rank = len(self.shape) + len(axes)
        at, kept = {a % rank for a in axes}, iter(zip(self.shape, self.strides, strict=True))
        pairs = [(1, 0) if i in at else next(kept) for i in range(rank)]
        return replace(self, shape=tuple(d for d, _ in pairs), strides=tuple(s for _, s in pairs))

    def expand(self, shape: Sequence[Any]) -> View:
        """The view after an Expand to `shape`, which has this rank."""
        strides = tuple(0 if d == 1 else s for d, s in zip(self.shape, self.strides, strict=True))
        return replace(self, shape=tuple(shape), strides=strides)

    def merge_heads(self, shape: Sequence[Any]) -> View | None:
        """The view after a Reshape that merges heads [.., heads, group, rows, elements] with a repeated group axis; None for any other."""
        if len(self.shape) < 4:
            return None
        *lead, heads, group, rows, size = self.shape
        if self.group > 1 or self.strides[-3] != 0 or tuple(shape) != (*lead, heads * group, rows, size):
            return None
        return replace(self, shape=tuple(shape), strides=(*self.strides[:-3], *self.strides[-2:]), group=group)

    def repeat(self, repeats: Sequence[Any]) -> View | None:
        """The view after a Tile along the first axis; None for any other."""
        if self.period or self.group > 1 or any(r != 1 for r in repeats[1:]):
            return None
        return replace(self, shape=(self.shape[0] * repeats[0], *self.shape[1:]), period=self.shape[0])

    def reshape(self, shape: Sequence[Any]) -> View | None:
        """The view after a Reshape; None where the elements would have to be copied."""
        if tuple(shape) == self.shape:
            return self
        if self.period or self.group > 1:
            return None
        old, new = [(d, s) for d, s in zip(self.shape, self.strides, strict=True) if d != 1], [d for d in shape if d != 1]
        strides: list[Any] = []
        while old and new and old[0][0] == new[0]:
            strides.append(old.pop(0)[1])
            new.pop(0)
        last: list[Any] = []
        while old and new and old[-1][0] == new[-1]:
            last.insert(0, old.pop()[1])
            new.pop()
        if not all(isinstance(d, int) for d in (*(d for d, _ in old), *new)):
            return None
        between = _regroup(old, new)
        if between is None:
            return None
        kept = iter([*strides, *between, *last])
        return replace(self, shape=tuple(shape), strides=tuple(0 if d == 1 else next(kept) for d in shape))


def _regroup(old: list[tuple[int, Any]], new: list[int]) -> list[Any] | None:
    """Strides of the dimensions `new` over axes (dimension, stride) of the same number of elements; None where they are not strided."""
    strides: list[Any] = []
    while old or new:
        axes, dims = [old.pop(0)] if old else [], [new.pop(0)] if new else []
        while prod(d for d, _ in axes) != prod(dims):
            smaller = prod(d for d, _ in axes) < prod(dims)
            if not (old if smaller else new):
                return None
            if smaller:
                axes.append(old.pop(0))
            else:
                dims.append(new.pop(0))
        if any(a[1] != b[0] * b[1] for a, b in pairwise(axes)):
            return None
        step = axes[-1][1]
        steps: list[Any] = []
        for d in reversed(dims):
            steps.insert(0, step)
            step = step * d
        strides += steps
    return strides


def make_plain_view(place: int, shape: Sequence[Any]) -> View:
    """The view of a whole row-major tensor."""
    strides: list[Any] = []
    at: Any = 1
    for d in reversed(shape):
        strides.insert(0, at)
        at = at * d
    return View(place, tuple(shape), tuple(strides))


def find_views_after(x: Layer, view: View, constant: Callable[[Tensor | None], np.ndarray | None]) -> list[View] | None:
    """The outputs of a layer that moves no data, whose first input is `view`; None for a layer that is not one or needs a copy.

    `constant` gives the array of a constant tensor and None for other tensors. Dimensions may be symbolic.
    """
    shape = x.outputs[0].shape
    match x.op:
        case "Transpose":
            return [view.transpose(x.attrs.get("perm") or tuple(range(len(view.shape)))[::-1])]
        case "Gather":
            index = constant(x.inputs[1])
            axis = x.attrs.get("axis", 0) % len(view.shape)
            return [view.take(axis, int(index))] if index is not None and index.ndim == 0 and isinstance(view.shape[axis], int) else None
        case "Slice" if any(t is not None and constant(t) is None for t in x.inputs[1:]):
            return None
        case "Slice":
            for axis, (start, count, step) in slice_ranges(x).items():
                if step != 1 or not isinstance(start, int) or view.period:
                    return None
                view = view.cut(axis, start, count)
            return [view]
        case "Split":
            axis = x.attrs["axis"] % len(view.shape)
            parts = [] if len(x.inputs) > 1 and constant(x.inputs[1]) is None else list_part_sizes(x)
            if not parts or not all(isinstance(p, int) for p in parts):
                return None
            return [view.cut(axis, sum(parts[:i]), n) for i, n in enumerate(parts)]
        case "Unsqueeze":
            axes = x.attrs.get("axes") or constant(x.inputs[1])
            return None if axes is None else [view.insert_axes([int(a) for a in np.ravel(axes)])]
        case "Expand":
            return [view.expand(shape)] if len(shape) == len(view.shape) else None
        case "Tile":
            repeats = x.attrs.get("repeats") or constant(x.inputs[1])
            result = None if repeats is None else view.repeat(tuple(repeats))
        case "Reshape" | "Squeeze" | "Flatten":
            result = view.merge_heads(shape) or view.reshape(shape)
        case _:
            return None
    return None if result is None else [result]
