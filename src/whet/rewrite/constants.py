"""Constants of a network as expressions: arithmetic in float64 that is rounded once, with the origin kept."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from whet.network import F64, DType, Tensor, Weight
from whet.ops._origin import express, literal


def wide(w: Weight) -> Weight:
    """`w` in float64."""
    return w if w.type.dtype == F64 else express("Cast", w, to=F64)


def narrow(w: Weight, dtype: DType) -> Weight:
    """`w` rounded to `dtype`."""
    return w if w.type.dtype == dtype else express("Cast", w, to=dtype)


def shaped(w: Weight, shape: tuple[int, ...]) -> Weight:
    """`w` in another shape."""
    return w if w.array.shape == shape else express("Reshape", w, shape=shape)


def along(w: Weight, axis: int, rank: int) -> Weight:
    """A vector as a tensor of `rank` that broadcasts along all axes but `axis`."""
    return shaped(w, tuple(w.array.size if i == axis else 1 for i in range(rank)))


def number(value: float, dtype: DType = F64) -> Weight:
    """A scalar that a pass wrote down."""
    return literal(np.array(value), dtype)


def scalar(t: Tensor | None) -> float | None:
    """The value of a constant of one element; None for anything else."""
    if t is None or t.weight is None or t.weight.array.size != 1:
        return None
    return float(t.weight.array.reshape(-1)[0])


def is_scalar(t: Tensor | None, value: float, rtol: float = 1e-6) -> bool:
    """Whether `t` is a constant of one element equal to `value` as far as its type can tell."""
    got = scalar(t)
    return got is not None and abs(got - value) <= rtol * abs(value)


def equal_weights(a: Tensor | None, b: Tensor | None) -> bool:
    """Whether two constants hold the same type and bytes."""
    if a is None or b is None or a is b:
        return a is b
    return a.weight is not None and b.weight is not None and a.weight.digest == b.weight.digest


def fingerprint(t: Tensor) -> object:
    """Equal for equal constants, and cheap: type and a sample of the bytes. The digest decides where it is equal."""
    flat = t.array().reshape(-1)
    return (str(t.type), flat[:: max(1, flat.size // 32)].tobytes())


def assume_equal(kept: Tensor, gone: Tensor) -> None:
    """Records in the origin of `kept` that `gone`, for which it stands from now on, was equal to it."""
    w, other = kept.constant(), gone.constant()
    if w.origin == other.origin or other.origin.op == "literal":
        return
    note = f"equal to {other.origin}"
    if note not in w.origin.assumes:
        made = replace(w, origin=replace(w.origin, assumes=(*w.origin.assumes, note)))
        made.__dict__["digest"] = w.digest
        kept.weight = made


def filled(w: Weight, axis: int, layout: np.ndarray, value: float = 0) -> Weight:
    """`w` with the entries of `axis` in a new order: `layout` has the old place of each, less than 0 for one that is filled with `value`."""
    n = w.array.shape[axis]
    grown = len(layout) - n
    behind = bool((layout[:n] == np.arange(n)).all())
    pads = [0] * 2 * w.array.ndim
    pads[w.array.ndim + axis] = grown if behind else 1
    more = express("Pad", w, None, literal(np.array(value, w.array.dtype)), pads=tuple(pads))
    return more if behind else express("Gather", more, literal(np.where(layout < 0, n, layout).astype(np.int64)), axis=axis)
