"""Constants as expressions over source weights: arithmetic in float64 that is rounded once and keeps its provenance."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from whet.network import F64, DType, Tensor, Weight
from whet.ops._origin import express, make_literal


def to_float64(w: Weight) -> Weight:
    """`w` in float64."""
    return w if w.type.dtype == F64 else express("Cast", w, to=F64)


def round_to(w: Weight, dtype: DType) -> Weight:
    """`w` rounded to `dtype`."""
    return w if w.type.dtype == dtype else express("Cast", w, to=dtype)


def reshape_weight(w: Weight, shape: tuple[int, ...]) -> Weight:
    """`w` with another shape."""
    return w if w.array.shape == shape else express("Reshape", w, shape=shape)


def reshape_along_axis(w: Weight, axis: int, rank: int) -> Weight:
    """A vector as a tensor of `rank` dimensions that broadcasts along all axes but `axis`."""
    return reshape_weight(w, tuple(w.array.size if i == axis else 1 for i in range(rank)))


def make_scalar_weight(value: float, dtype: DType = F64) -> Weight:
    """A scalar constant that a pass introduces."""
    return make_literal(np.array(value), dtype)


def make_filled_weight(value: float, shape: tuple[int, ...], dtype: DType) -> Weight:
    """A constant of a pass with `value` in all elements."""
    return express("Expand", make_scalar_weight(value, dtype), shape=shape)


def is_introduced(t: Tensor | None) -> bool:
    """True for a constant that a pass has introduced, not one of the model."""
    origin = None if t is None or t.weight is None else t.weight.origin
    if origin is not None and origin.op == "Expand":
        origin = origin.args[0]
    return origin is not None and origin.op == "literal"


def scalar_value(t: Tensor | None) -> float | None:
    """The value of a constant of one element; None for anything else."""
    if t is None or t.weight is None or t.weight.array.size != 1:
        return None
    return float(t.weight.array.reshape(-1)[0])


def is_scalar(t: Tensor | None, value: float, rtol: float = 1e-6) -> bool:
    """True if `t` is a constant of one element within `rtol` of `value`."""
    number = scalar_value(t)
    return number is not None and abs(number - value) <= rtol * abs(value)


def are_equal_weights(a: Tensor | None, b: Tensor | None) -> bool:
    """True if two constants hold the same type and bytes."""
    if a is None or b is None or a is b:
        return a is b
    return a.weight is not None and b.weight is not None and a.weight.digest == b.weight.digest


def compute_fingerprint(t: Tensor) -> object:
    """A cheap hash key: the type and a sample of the bytes. Constants with equal keys are compared by digest."""
    flat = t.array().reshape(-1)
    return (str(t.type), flat[:: max(1, flat.size // 32)].tobytes())


def assume_equal(replacement: Tensor, removed: Tensor) -> None:
    """Records in the origin of `replacement` the assumption that `removed`, which it replaces, is equal to it."""
    w, other = replacement.constant(), removed.constant()
    if w.origin == other.origin or other.origin.op == "literal":
        return
    note = f"equal to {other.origin}"
    if note not in w.origin.assumes:
        annotated = replace(w, origin=replace(w.origin, assumes=(*w.origin.assumes, note)))
        annotated.__dict__["digest"] = w.digest  # a cached property: the values are the same
        replacement.weight = annotated


def gather_padded(w: Weight, axis: int, layout: np.ndarray, value: float = 0) -> Weight:
    """`w` with the entries of `axis` reordered: `layout` (int64 [entries]) holds the old index of each entry, negative for a new one of `value`."""
    n = w.array.shape[axis]
    added = len(layout) - n
    only_appends = bool((layout[:n] == np.arange(n)).all())
    pads = [0] * 2 * w.array.ndim
    pads[w.array.ndim + axis] = added if only_appends else 1
    padded = express("Pad", w, None, make_literal(np.array(value, w.array.dtype)), pads=tuple(pads))
    return padded if only_appends else express("Gather", padded, make_literal(np.where(layout < 0, n, layout).astype(np.int64)), axis=axis)
