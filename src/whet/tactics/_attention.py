"""The structure of an Attention layer, for every backend: strides of its operands, sizes, mask and scale."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import IntEnum
from math import gcd, prod

import numpy as np

from whet.network import Layer, Tensor, static_shape
from whet.ops._reduce import list_reduced_axes
from whet.ops._strided import View, find_views_after, make_plain_view


class Guard(IntEnum):
    """Which rows of probabilities are 0 in place of NaN. The values are constants of the CUDA kernels."""

    NONE = 0
    NAN = 1  # all rows of NaN
    HIDDEN = 2  # rows of which the mask hides every key by -infinity; NaN for another reason stays


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
    size: int  # elements of a row of q and of k
    value_size: int  # elements of a row of v and of the output
    scale: float
    guard: Guard = Guard.NONE
    cap: float = 0.0  # above 0: a scaled score s becomes cap * tanh(s) before the mask
    causal: int | None = None  # the mask is a constant that hides exactly the keys after row + causal: a kernel may skip them and not read it


    @property
    def rows_of(self) -> dict[str, tuple[View, int]]:
        """The operands and the output, each with the axis along which its elements are neighbours in memory."""
        return {"q": (self.q, -1), "k": (self.k, -1 if self.turned else -2), "v": (self.v, -1), "the output": (self.out, -1)}

    def unit(self, name: str) -> int:
        """The most 16-bit elements, 8 to 1, that an instruction moves of a row of an operand: they divide the row and the way to every other."""
        view, line = self.rows_of[name]
        steps = [s for i, (d, s) in enumerate(zip(view.shape, view.strides, strict=True)) if d > 1 and i - len(view.shape) != line]
        return gcd(8, view.shape[line], view.offset, *steps)


def match_attention(layer: Layer) -> Heads | str:
    """The structure of an Attention layer, or why no kernel supports it."""
    body = layer.regions["body"]
    views: dict[Tensor, View] = {t: make_plain_view(i, static_shape(t.shape)) for i, t in enumerate(body.inputs)}
    waiting, products = [], [x for x in body.layers if x.op == "MatMul"]
    for x in body.layers:  # transposes, slices and other moves of the inputs become strides
        source_view = None if x.inputs[0] is None else views.get(x.inputs[0])
        after = None if source_view is None else find_views_after(x, source_view, lambda t: _find_constant_array(layer, t))
        if after is None:
            waiting.append(x)
        else:
            views.update(zip(x.outputs, after, strict=True))
    if len(products) != 2 or waiting[0] is not products[0]:
        return "is not a chain between two matrix products"
    q, k = (None if t is None else views.get(t) for t in products[0].inputs)
    running, scale, cap, mask, softmax = products[0].output, 1.0, 0.0, None, False
    masked_by, condition, guard, row_max = None, None, Guard.NONE, None
    out: View | None = None
    v: View | None = None
    for x in waiting[1:]:
        others = [t for t in x.inputs if t is not None and t is not running]
        number = _find_constant_scalar(layer, others[0]) if len(others) == 1 else None
        if x.op == "ReduceMax" and masked_by is not None and x.inputs[0] is masked_by and _keeps_rows(x):
            row_max = x.output
            continue
        if x.op == "Equal" and row_max in x.inputs and any(t is not row_max and _find_constant_scalar(layer, t) == -np.inf for t in x.inputs):
            condition, guard = x.output, Guard.HIDDEN
            continue
        if running not in x.inputs:
            return f"{x.op} does not read the result before it"
        if x.op in ("Mul", "Div") and number is not None and mask is None and not softmax and (x.op == "Mul" or x.inputs[0] is running):
            scaled = (cap or scale) * number if x.op == "Mul" else (cap or scale) / number
            scale, cap = (scale, scaled) if cap else (scaled, cap)
        elif x.op == "Tanh" and not cap and mask is None and not softmax:
            cap = 1.0
        elif x.op == "Add" and mask is None and not softmax and len(others) == 1 and others[0] in views:
            mask, masked_by = views[others[0]], others[0]
        elif x.op == "Softmax" and not softmax:
            softmax = True
        elif x.op == "IsNaN" and softmax and v is None and condition is None:
            condition, guard = x.output, Guard.NAN
            continue
        elif x.op == "Where" and _is_guard(layer, x, condition, running) and softmax and v is None:
            condition = None
        elif x.op == "MatMul" and softmax and v is None and x.inputs[0] is running and others and others[0] in views:
            v = views[others[0]]
            shape = static_shape(x.output.shape)
            out = make_plain_view(0, shape)
        elif x.op == "Transpose" and out is not None:
            perm = x.attrs["perm"]
            stored = make_plain_view(0, static_shape(x.output.shape))
            strides = [0] * len(perm)
            for to, come in enumerate(perm):
                strides[come] = stored.strides[to]
            out = replace(out, strides=tuple(strides))
            if x is not body.layers[-1]:
                return "a layer follows the last transpose"
        else:
            return f"the kernel has no {x.op} here"
        running = x.output
    if q is None or k is None or v is None or out is None or condition is not None or body.outputs != [running]:
        return "is not a chain between two matrix products"
    heads = _match_heads(q, k, v, mask, out, scale)
    if not isinstance(heads, str):
        heads = replace(heads, guard=guard, cap=abs(cap), scale=-scale if cap < 0 else scale)
    if isinstance(heads, str) or heads.mask is None or not layer.needs(heads.mask.place).is_constant:
        return heads
    return replace(heads, causal=_match_diagonal_mask(layer.needs(heads.mask.place), heads.mask))


def why_not_aligned(heads: Heads) -> str | None:
    """Why a kernel that moves 16 bytes at a time cannot address the rows of these heads."""
    for name, (view, line) in heads.rows_of.items():
        if any(s % 8 for i, s in enumerate(view.strides) if i - len(view.strides) != line) or view.offset % 8:
            return f"rows of {name} are not aligned to 16 bytes"
    return None


def without_period(heads: Heads) -> Heads:
    """The same with the mask of one period, for kernels that index a mask by the batch item modulo the period."""
    if heads.mask is None or not heads.mask.period:
        return heads
    return replace(heads, mask=replace(heads.mask, shape=(heads.mask.period, *heads.mask.shape[1:]), period=0))


def _match_heads(q: View, k: View, v: View, mask: View | None, out: View, scale: float) -> Heads | str:
    joined = join_leading_axes({"q": q, "k": k, "v": v, "mask": mask, "out": out})
    if joined is None or len(q.shape) < 2:
        return f"batch and heads are {len(out.shape) - 2} axes that are not two steps in memory"
    q, k, v, mask, out = joined["q"], joined["k"], joined["v"], joined.get("mask"), joined["out"]
    shape = (1, 1, *out.shape)[-4:]
    (rows, size), keys = q.shape[-2:], k.shape[-1]
    heads = Heads(q, k, v, mask, out, k.strides[-1] == 1, shape[0], shape[1], rows, keys, size, v.shape[-1], scale)
    for name, (view, line) in heads.rows_of.items():
        if view.period:
            return f"{name} repeats along the batch"
        if view.group > 1 and name not in "kv":
            return f"several heads share one head of {name}"
        if not view.fits(heads.batch, heads.heads):
            return f"{name} is broadcast along some of its axes only"
        if view.strides[line] != 1:
            return f"elements of a row of {name} are not next to each other"
    if mask is not None:
        wide = (1, 1, 1, 1, *mask.shape)[-4:]
        steps = (0, 0, 0, 0, *mask.strides)[-4:]
        if len(mask.shape) > 4 or any(d not in (1, n) for d, n in zip(wide, (*shape[:2], rows, keys), strict=True)):
            return "the mask is broadcast along some of its axes only"
        strides = tuple(0 if d == 1 else s for d, s in zip(wide, steps, strict=True))
        heads = replace(heads, mask=replace(mask, shape=wide, strides=strides))
    if not prod(shape) * keys or shape[0] * shape[1] > 65535:
        return "no heads, or more than 65535 of them"
    return heads


def join_leading_axes(views: dict[str, View | None]) -> dict[str, View] | None:
    """The views with at most two axes before the last two. Axes of size 1 are dropped; two axes become one if every view walks them in equal steps.
    None if too many axes are left."""
    present = {name: view for name, view in views.items() if view is not None}
    rank = len(present["out"].shape)
    if rank <= 4:
        return present
    if any(v.period or v.group > 1 or len(v.shape) > rank for v in present.values()):
        return None
    padded = {name: view.insert_axes(range(rank - len(view.shape))) for name, view in present.items()}
    kept = [i for i in range(rank) if i >= rank - 2 or present["out"].shape[i] > 1]
    joined = {name: view.transpose(kept) for name, view in padded.items()}
    while len(kept) > 4:
        count = len(kept) - 2
        pairs = ((outer, inner) for outer in range(count) for inner in range(count) if outer != inner)
        pair = next((p for p in pairs if all(_are_one_step(v, *p) for v in joined.values())), None)
        if pair is None:
            return None
        joined = {name: _join_axes(view, *pair) for name, view in joined.items()}
        kept.pop()
    return joined


def _are_one_step(view: View, outer: int, inner: int) -> bool:
    """True if two axes of a view are one axis in memory, or are both broadcast."""
    (a, b), (step_a, step_b) = ([values[i] for i in (outer, inner)] for values in (view.shape, view.strides))
    return (a == 1 and b == 1) or (b > 1 and a > 1 and step_a == step_b * b)


def _join_axes(view: View, outer: int, inner: int) -> View:
    """The view whose first axis is the axis `outer` times the axis `inner`."""
    rest = [i for i in range(len(view.shape)) if i not in (outer, inner)]
    moved = view.transpose(rest)
    return replace(moved, shape=(view.shape[outer] * view.shape[inner], *moved.shape), strides=(view.strides[inner], *moved.strides))


def _keeps_rows(reduction: Layer) -> bool:
    """True if a reduction is over the keys of a mask and keeps the axis."""
    x = reduction.inputs[0]
    return x is not None and list_reduced_axes(reduction) == (x.type.rank - 1,) and bool(reduction.attrs["keepdims"])


def _is_guard(layer: Layer, where: Layer, condition: Tensor | None, weights: Tensor) -> bool:
    """True if a Where makes the rows of `weights` 0 for which `condition` holds."""
    return (
        condition is not None and where.inputs[0] is condition and where.inputs[2] is weights and _find_constant_scalar(layer, where.inputs[1]) == 0
    )


def _find_constant_scalar(layer: Layer, t: Tensor | None) -> float | None:
    """The value of a constant with one element; None for other tensors."""
    array = None if t is None or prod(static_shape(t.shape)) != 1 else _find_constant_array(layer, t)
    return None if array is None else float(np.asarray(array, np.float64).reshape(-1)[0])


def _find_constant_array(layer: Layer, t: Tensor | None) -> np.ndarray | None:
    """The array of a constant that the body reads."""
    body = layer.regions["body"]
    outer = next((layer.inputs[i] for i, x in enumerate(body.inputs) if x is t), t)
    return np.asarray(outer.array()) if outer is not None and outer.is_constant else None


HIDES = -3e4
"""A mask value from here down hides its key: next to any ordinary score, exp of the difference is 0 in f32."""


def _match_diagonal_mask(t: Tensor, mask: View) -> int | None:
    """d, where the constant mask is 0 for keys 0 .. row + d and hides those after; None for other masks."""
    if mask.shape[:2] != (1, 1) or mask.shape[-2] == 1 or mask.shape[-1] == 1:
        return None
    return _find_diagonal(t.weight.digest, t, mask) if t.weight is not None else None


_diagonals: dict[tuple[str, View], int | None] = {}


def _find_diagonal(digest: str, t: Tensor, mask: View) -> int | None:
    if (digest, mask) not in _diagonals:
        rows, keys = mask.shape[-2:]
        at = mask.offset + np.arange(rows)[:, None] * mask.strides[-2] + np.arange(keys) * mask.strides[-1]
        array = np.asarray(t.array(), np.float32).reshape(-1)[at]
        hidden = array <= HIDES
        diagonal = keys - 1 if not hidden[0].any() else int(hidden[0].argmax()) - 1
        exact = diagonal >= 0 and bool((hidden == (np.arange(keys) > np.arange(rows)[:, None] + diagonal)).all())
        _diagonals[digest, mask] = diagonal if exact and hidden.any() and not array[~hidden].any() else None
    return _diagonals[digest, mask]
