"""Memory formats of tensors: whet's named set, with size and strides of each.

    linear    row-major, any rank (nchw for images)
    nhwc      channels last, rank 3 to 5
    nChw8c    channels in blocks of 8, padded with zeros, rank 4
    nChw16c   channels in blocks of 16, padded with zeros, rank 4
Layouts of packed weights are private to tactics and have no name here.
"""

from __future__ import annotations

from math import prod

import numpy as np

from whet.errors import NetworkError
from whet.network.dims import Dim, Shape, ceildiv, product
from whet.network.types import TensorType, static_shape

FORMATS = ("linear", "nhwc", "nChw8c", "nChw16c")
_BLOCK = {"nChw8c": 8, "nChw16c": 16}
_RANKS = {"linear": range(0, 33), "nhwc": range(3, 6), "nChw8c": range(4, 5), "nChw16c": range(4, 5)}


def format_fits(fmt: str, rank: int) -> bool:
    """True if a tensor of `rank` can have the format."""
    return rank in _RANKS[fmt]


def find_block(fmt: str) -> int:
    """Channels of a block; 1 for formats without blocks."""
    return _BLOCK.get(fmt, 1)


def compute_stored_shape(fmt: str, shape: Shape) -> Shape:
    """The row-major shape of the bytes in memory, padding included."""
    if fmt not in _RANKS or not format_fits(fmt, len(shape)):
        raise NetworkError(f"format {fmt!r} does not hold a tensor of rank {len(shape)}; formats: {', '.join(FORMATS)}")
    if fmt == "nhwc":
        return (shape[0], *shape[2:], shape[1])
    if fmt in _BLOCK:
        n, c, h, w = shape
        return (n, ceildiv(c, _BLOCK[fmt]), h, w, _BLOCK[fmt])
    return shape


def format_bytes(type_: TensorType, fmt: str) -> Dim:
    """Bytes of a tensor of `type_` in memory in `fmt` (symbolic if the shape is); sub-byte elements take one byte each, as in NumPy."""
    return product(compute_stored_shape(fmt, type_.shape)) * max(type_.dtype.bits // 8, 1)


def compute_strides(fmt: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides in elements of the logical axes; not for blocked formats."""
    if fmt in _BLOCK:
        raise NetworkError(f"{fmt} is blocked: its channel axis has no single stride")
    stored = static_shape(compute_stored_shape(fmt, shape))
    row = [prod(stored[i + 1 :]) for i in range(len(stored))]
    return (row[0], row[-1], *row[1:-1]) if fmt == "nhwc" else tuple(row)


def to_stored(a: np.ndarray, fmt: str) -> np.ndarray:
    """`a` (logical) as a contiguous array of `compute_stored_shape`, padding zero."""
    if fmt == "linear":
        return np.ascontiguousarray(a)
    if fmt == "nhwc":
        return np.ascontiguousarray(np.moveaxis(a, 1, -1))
    b = _BLOCK[fmt]
    n, c, h, w = a.shape
    out = np.zeros((n, -(-c // b), b, h, w), a.dtype)
    out.reshape(n, -1, h, w)[:, :c] = a
    return np.ascontiguousarray(out.transpose(0, 1, 3, 4, 2))


def from_stored(s: np.ndarray, fmt: str, shape: tuple[int, ...]) -> np.ndarray:
    """The logical view (or copy, for blocked formats) of an array of `compute_stored_shape`."""
    if fmt == "linear":
        return s.reshape(shape)
    if fmt == "nhwc":
        return np.moveaxis(s.reshape(static_shape(compute_stored_shape(fmt, shape))), -1, 1)
    n, c, h, w = shape
    return s.transpose(0, 1, 4, 2, 3).reshape(n, -1, h, w)[:, :c]


def has_same_bytes(source: str, target: str, shape: tuple[int, ...], perm: tuple[int, ...] | None = None) -> bool:
    """True if a tensor of `shape` in format `source` and its transpose by `perm` (None: the tensor itself) in `target` have the same bytes."""
    if any(f not in FORMATS or not format_fits(f, len(shape)) for f in (source, target)):
        return False
    axes = tuple(range(len(shape))) if perm is None else tuple(perm)
    if source == target and axes == tuple(range(len(shape))):
        return True
    one, other = _find_memory_order(source, shape), _find_memory_order(target, tuple(shape[a] for a in axes))
    return one is not None and other is not None and one == [(axes[a], d) for a, d in other]


def _find_memory_order(fmt: str, shape: tuple[int, ...]) -> list[tuple[int, int]] | None:
    """The axes longer than 1 with their lengths in memory order, a blocked channel axis as two; None for formats with padding."""
    axes = list(enumerate(shape))
    if fmt == "nhwc":
        axes = [axes[0], *axes[2:], axes[1]]
    elif fmt in _BLOCK:
        block = _BLOCK[fmt]
        if shape[1] % block:
            return None
        axes = [axes[0], (1, shape[1] // block), *axes[2:], (1, block)]
    merged: list[tuple[int, int]] = []
    for axis, d in axes:  # adjacent parts of a blocked axis are one axis
        if d == 1:
            continue
        if merged and merged[-1][0] == axis:
            merged[-1] = (axis, merged[-1][1] * d)
        else:
            merged.append((axis, d))
    return merged
