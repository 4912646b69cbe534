"""The structure of an Attention layer, for every backend: strides of its operands, sizes, mask and scale."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod

import numpy as np

from whet.network import Layer, Tensor, static_shape


@dataclass(frozen=True)
class View:
    """A tensor of the body as a view of an input (or the output) of the layer: shape, strides and offset in elements."""

    place: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int = 0
    group: int = 1  # consecutive heads that read the same head of the input (grouped-query attention)

    def turned(self, perm: Sequence[int]) -> View:
        """The view after a Transpose."""
        return replace(self, shape=tuple(self.shape[i] for i in perm), strides=tuple(self.strides[i] for i in perm))

    def taken(self, axis: int, index: int) -> View:
        """The view after a Gather of one index, which drops the axis."""
        axis, index = axis % len(self.shape), index % self.shape[axis]
        kept = [i for i in range(len(self.shape)) if i != axis]
        return replace(self.turned(kept), offset=self.offset + index * self.strides[axis])

    def leading(self, batch: int, heads: int) -> tuple[int, int] | None:
        """Strides of batch and head; 0 for a broadcast axis. None for other leading axes, or where heads share one head of the input."""
        return self.steps() if self.group == 1 and self.fits(batch, heads) else None

    def fits(self, batch: int, heads: int) -> bool:
        """Whether the leading axes are batch and heads, each whole or broadcast."""
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

    def swapped(self) -> View:
        """The view with the last two axes exchanged."""
        return self.turned((*range(len(self.shape) - 2), len(self.shape) - 1, len(self.shape) - 2))

    def inserted(self, axes: Sequence[int]) -> View:
        """The view after an Unsqueeze."""
        rank = len(self.shape) + len(axes)
        at, kept = {a % rank for a in axes}, iter(zip(self.shape, self.strides, strict=True))
        pairs = [(1, 0) if i in at else next(kept) for i in range(rank)]
        return replace(self, shape=tuple(d for d, _ in pairs), strides=tuple(s for _, s in pairs))

    def expanded(self, shape: Sequence[int]) -> View:
        """The view after an Expand to `shape`, which has this rank."""
        strides = tuple(0 if d == 1 else s for d, s in zip(self.shape, self.strides, strict=True))
        return replace(self, shape=tuple(shape), strides=strides)

    def merged(self, shape: Sequence[int]) -> View | None:
        """The view after a Reshape that merges heads [.., heads, group, rows, elements] with a repeated group axis; None for any other."""
        *lead, heads, group, rows, size = self.shape if len(self.shape) >= 4 else (0, 0, 0, 0)
        if self.group > 1 or self.strides[-3] != 0 or tuple(shape) != (*lead, heads * group, rows, size):
            return None
        return replace(self, shape=tuple(shape), strides=(*self.strides[:-3], *self.strides[-2:]), group=group)


@dataclass(frozen=True)
class Heads:
    """An attention: views of q, k (one row per key), v, mask and the output, and its sizes."""

    q: View
    k: View
    v: View
    mask: View | None
    out: View
    turned: bool  # keys are columns of k in memory
    batch: int
    heads: int
    rows: int
    keys: int
    size: int
    scale: float
    causal: int | None = None  # the mask is a constant that hides exactly the keys after row + causal: a kernel may skip them and not read it


def match_attention(layer: Layer, *, grouped: bool = False) -> Heads | str:
    """The structure of an Attention layer, or why the kernels do not support it. `grouped`: several heads of q may share a head of k and v."""
    body = layer.regions["body"]
    views: dict[Tensor, View] = {t: plain_view(i, static_shape(t.shape)) for i, t in enumerate(body.inputs)}
    waiting, products = [], [x for x in body.layers if x.op == "MatMul"]
    for x in body.layers:  # transposes and slices of the inputs become strides
        source_view = None if x.inputs[0] is None else views.get(x.inputs[0])
        if x.op == "Transpose" and source_view is not None:
            views[x.output] = source_view.turned(x.attrs.get("perm") or tuple(range(len(source_view.shape)))[::-1])
        elif x.op == "Gather" and source_view is not None and (index := _index(layer, x)) is not None:
            views[x.output] = source_view.taken(x.attrs.get("axis", 0), index)
        elif source_view is not None and (shared := _shared_heads(layer, x, source_view)) is not None:
            views[x.output] = shared
        else:
            waiting.append(x)
    if len(products) != 2 or waiting[0] is not products[0]:
        return "is not a chain between two matrix products"
    q, k = (None if t is None else views.get(t) for t in products[0].inputs)
    running, scale, mask, softmax = products[0].output, 1.0, None, False
    out: View | None = None
    v: View | None = None
    for x in waiting[1:]:
        others = [t for t in x.inputs if t is not None and t is not running]
        number = _one_number(layer, others[0]) if len(others) == 1 else None
        if running not in x.inputs:
            return f"{x.op} does not read the result before it"
        if x.op in ("Mul", "Div") and number is not None and mask is None and not softmax and (x.op == "Mul" or x.inputs[0] is running):
            scale = scale * number if x.op == "Mul" else scale / number
        elif x.op == "Add" and mask is None and not softmax and len(others) == 1 and others[0] in views:
            mask = views[others[0]]
        elif x.op == "Softmax" and not softmax:
            softmax = True
        elif x.op == "MatMul" and softmax and v is None and x.inputs[0] is running and others and others[0] in views:
            v = views[others[0]]
            shape = static_shape(x.output.shape)
            out = plain_view(0, shape)
        elif x.op == "Transpose" and out is not None:
            perm = x.attrs["perm"]
            stored = plain_view(0, static_shape(x.output.shape))
            strides = [0] * len(perm)
            for to, come in enumerate(perm):
                strides[come] = stored.strides[to]
            out = replace(out, strides=tuple(strides))
            if x is not body.layers[-1]:
                return "a layer follows the last transpose"
        else:
            return f"the kernel has no {x.op} here"
        running = x.output
    if q is None or k is None or v is None or out is None or body.outputs != [running]:
        return "is not a chain between two matrix products"
    heads = _heads(q, k, v, mask, out, scale, grouped)
    if isinstance(heads, str) or heads.mask is None or not layer.needs(heads.mask.place).is_constant:
        return heads
    return replace(heads, causal=_diagonal(layer.needs(heads.mask.place), heads.mask))


def _shared_heads(layer: Layer, x: Layer, view: View) -> View | None:
    """The view after a layer that lets heads of k and v serve several heads of q (Unsqueeze, Expand, Reshape); None for other layers."""
    shape = static_shape(x.output.shape)
    if x.op == "Unsqueeze":
        axes = x.attrs.get("axes") or _constant(layer, x.inputs[1])
        return None if axes is None else view.inserted([int(a) for a in np.ravel(axes)])
    if x.op == "Expand":
        return view.expanded(shape) if len(shape) == len(view.shape) else None
    return view.merged(shape) if x.op == "Reshape" else None


def _heads(q: View, k: View, v: View, mask: View | None, out: View, scale: float, grouped: bool) -> Heads | str:
    shape = (1, 1, *out.shape)[-4:] if len(out.shape) <= 4 else ()
    if not shape or len(q.shape) < 2:
        return "more than four axes"
    (rows, size), keys = q.shape[-2:], k.shape[-1]
    if size % 16 or not 16 <= size <= 128 or v.shape[-1] != size:
        return f"heads of {size} and {v.shape[-1]} elements: the kernel takes equal ones, 16 to 128 in steps of 16"
    turned = k.strides[-1] == 1
    found = Heads(q, k, v, mask, out, turned, shape[0], shape[1], rows, keys, size, scale)
    for name, view, line in (("q", q, -1), ("k", k, -1 if turned else -2), ("v", v, -1), ("the output", out, -1)):
        if view.group > 1 and not (grouped and name in "kv"):
            return f"several heads share one head of {name}"
        if not view.fits(found.batch, found.heads):
            return f"{name} is broadcast along some of its axes only"
        if view.strides[line] != 1 or any(s % 8 for i, s in enumerate(view.strides) if i - len(view.strides) != line) or view.offset % 8:
            return f"rows of {name} are not aligned to 16 bytes"
    if mask is not None:
        wide = (1, 1, 1, 1, *mask.shape)[-4:]
        steps = (0, 0, 0, 0, *mask.strides)[-4:]
        if len(mask.shape) > 4 or any(d not in (1, n) for d, n in zip(wide, (*shape[:2], rows, keys), strict=True)):
            return "the mask is broadcast along some of its axes only"
        strides = tuple(0 if d == 1 else s for d, s in zip(wide, steps, strict=True))
        found = replace(found, mask=replace(mask, shape=wide, strides=strides))
    if not prod(shape) * keys or shape[0] * shape[1] > 65535:
        return "no heads, or more than 65535 of them"
    return found


def plain_view(place: int, shape: tuple[int, ...]) -> View:
    """The view of a whole row-major tensor."""
    strides: list[int] = []
    at = 1
    for d in reversed(shape):
        strides.insert(0, at)
        at *= d
    return View(place, shape, tuple(strides))


def _index(layer: Layer, gather: Layer) -> int | None:
    """The constant scalar index of a Gather; None for another Gather."""
    t = gather.inputs[1]
    number = None if t is None or t.type.rank else _one_number(layer, t)
    return None if number is None else int(number)


def _one_number(layer: Layer, t: Tensor) -> float | None:
    """The value of a constant with one element; None for other tensors."""
    array = None if prod(static_shape(t.shape)) != 1 else _constant(layer, t)
    return None if array is None else float(np.asarray(array, np.float64).reshape(-1)[0])


def _constant(layer: Layer, t: Tensor | None) -> np.ndarray | None:
    """The array of a constant that the body reads."""
    body = layer.regions["body"]
    outer = next((layer.inputs[i] for i, x in enumerate(body.inputs) if x is t), t)
    return np.asarray(outer.array()) if outer is not None and outer.is_constant else None


HIDES = -3e4
"""A mask value from here down hides its key: next to any ordinary score, exp of the difference is 0 in f32."""


def _diagonal(t: Tensor, mask: View) -> int | None:
    """d, where the constant mask is 0 for keys 0 .. row + d and hides those after; None for other masks."""
    if mask.shape[:2] != (1, 1) or mask.shape[-2] == 1 or mask.shape[-1] == 1:
        return None
    return _diagonal_of(t.weight.digest, t, mask) if t.weight is not None else None


_diagonals: dict[tuple[str, View], int | None] = {}


def _diagonal_of(digest: str, t: Tensor, mask: View) -> int | None:
    if (digest, mask) not in _diagonals:
        rows, keys = mask.shape[-2:]
        at = mask.offset + np.arange(rows)[:, None] * mask.strides[-2] + np.arange(keys) * mask.strides[-1]
        array = np.asarray(t.array(), np.float32).reshape(-1)[at]
        hidden = array <= HIDES
        diagonal = keys - 1 if not hidden[0].any() else int(hidden[0].argmax()) - 1
        exact = diagonal >= 0 and bool((hidden == (np.arange(keys) > np.arange(rows)[:, None] + diagonal)).all())
        _diagonals[digest, mask] = diagonal if exact and hidden.any() and not array[~hidden].any() else None
    return _diagonals[digest, mask]
