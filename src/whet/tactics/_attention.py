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

    def turned(self, perm: Sequence[int]) -> View:
        """The view after a Transpose."""
        return replace(self, shape=tuple(self.shape[i] for i in perm), strides=tuple(self.strides[i] for i in perm))

    def taken(self, axis: int, index: int) -> View:
        """The view after a Gather of one index, which drops the axis."""
        axis, index = axis % len(self.shape), index % self.shape[axis]
        kept = [i for i in range(len(self.shape)) if i != axis]
        return replace(self.turned(kept), offset=self.offset + index * self.strides[axis])

    def leading(self, batch: int, heads: int) -> tuple[int, int] | None:
        """Strides of batch and head; 0 for a broadcast axis. None for other leading axes."""
        shape, strides = (1, 1, *self.shape[:-2])[-2:], (0, 0, *self.strides[:-2])[-2:]
        if len(self.shape) > 4 or any(d not in (1, n) for d, n in zip(shape, (batch, heads), strict=True)):
            return None
        return strides[0] if shape[0] > 1 else 0, strides[1] if shape[1] > 1 else 0


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


def taken_apart(layer: Layer) -> Heads | str:
    """The structure of an Attention layer, or why the kernels do not support it."""
    body = layer.regions["body"]
    views: dict[Tensor, View] = {t: plain_view(i, static_shape(t.shape)) for i, t in enumerate(body.inputs)}
    waiting, products = [], [x for x in body.layers if x.op == "MatMul"]
    for x in body.layers:  # transposes and slices of the inputs become strides
        source_view = None if x.inputs[0] is None else views.get(x.inputs[0])
        if x.op == "Transpose" and source_view is not None:
            views[x.output] = source_view.turned(x.attrs.get("perm") or tuple(range(len(source_view.shape)))[::-1])
        elif x.op == "Gather" and source_view is not None and (index := _index(layer, x)) is not None:
            views[x.output] = source_view.taken(x.attrs.get("axis", 0), index)
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
    return _heads(q, k, v, mask, out, scale)


def _heads(q: View, k: View, v: View, mask: View | None, out: View, scale: float) -> Heads | str:
    shape = (1, 1, *out.shape)[-4:] if len(out.shape) <= 4 else ()
    if not shape or len(q.shape) < 2:
        return "more than four axes"
    (rows, size), keys = q.shape[-2:], k.shape[-1]
    if size % 16 or not 16 <= size <= 128 or v.shape[-1] != size:
        return f"heads of {size} and {v.shape[-1]} elements: the kernel takes equal ones, 16 to 128 in steps of 16"
    turned = k.strides[-1] == 1
    found = Heads(q, k, v, mask, out, turned, shape[0], shape[1], rows, keys, size, scale)
    for name, view, line in (("q", q, -1), ("k", k, -1 if turned else -2), ("v", v, -1), ("the output", out, -1)):
        lead = view.leading(found.batch, found.heads)
        if lead is None:
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
    body = layer.regions["body"]
    outer = next((layer.inputs[i] for i, x in enumerate(body.inputs) if x is t), t)
    if outer is None or not outer.is_constant or prod(static_shape(outer.shape)) != 1:
        return None
    return float(np.asarray(outer.array(), np.float64).reshape(-1)[0])
