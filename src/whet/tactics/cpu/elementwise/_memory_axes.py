"""Loop nests over dense tensors: axes in memory order, strides of operands that broadcast, merging of adjacent axes."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from whet.network import format_fits
from whet.tactics.cpu.onednn._kernel import list_image_formats

_BLOCKS = {"nChw8c": 8, "nChw16c": 16}


def find_memory_shape(form: str, shape: Sequence[int]) -> tuple[int, ...] | None:
    """The sizes of the axes in memory order; a blocked channel axis is two. None for padded formats."""
    if form == "linear":
        return tuple(shape)
    if form == "nhwc":
        return (shape[0], *shape[2:], shape[1])
    block = _BLOCKS[form]
    return None if shape[1] % block else (shape[0], shape[1] // block, *shape[2:], block)


def broadcast_strides(form: str, shape: Sequence[int], own: Sequence[int], is_row_major: bool) -> tuple[int, ...] | None:
    """Strides of an operand of shape `own` for each axis of `find_memory_shape(form, shape)`, 0 along broadcast axes.

    `is_row_major`: the operand is stored row-major, not in `form`. None if an axis of the nest has no stride in the operand.
    """
    full = (1,) * (len(shape) - len(own)) + tuple(own)
    stored = full if is_row_major else find_memory_shape(form, full)
    if stored is None:
        return None
    dense = [0 if d == 1 else prod(stored[i + 1 :]) for i, d in enumerate(stored)]
    if form == "linear":
        return tuple(dense)
    if form == "nhwc":
        return (dense[0], *dense[2:], dense[1]) if is_row_major else tuple(dense)
    if not is_row_major:
        return tuple(dense) if full[1] == shape[1] else None
    block = _BLOCKS[form]
    return (dense[0], dense[1] * block, *dense[2:], dense[1])


def merge_axes(sizes: Sequence[int], rows: Sequence[Sequence[int]], marks: Sequence[object] = ()) -> tuple[list[int], list[list[int]], list[object]]:
    """Sizes and each operand's strides without axes of size 1, adjacent axes merged if every operand is contiguous across them.

    `marks`: a value per axis; only axes with equal marks are merged. Returns at least one axis.
    """
    labels = list(marks) or [None] * len(sizes)
    kept: list[int] = []
    strides: list[list[int]] = [[] for _ in rows]
    kept_marks: list[object] = []
    for i, d in enumerate(sizes):
        if d == 1:
            continue
        if kept and kept_marks[-1] == labels[i] and all(s[-1] == row[i] * d for s, row in zip(strides, rows, strict=True)):
            kept[-1] *= d
            for s, row in zip(strides, rows, strict=True):
                s[-1] = row[i]
        else:
            kept.append(d)
            kept_marks.append(labels[i])
            for s, row in zip(strides, rows, strict=True):
                s.append(row[i])
    if not kept:
        return [1], [[0] for _ in rows], [labels[0] if labels else None]
    return kept, strides, kept_marks


def pad_channels(form: str, shape: Sequence[int], channels: int) -> tuple[int, ...]:
    """The shape with whole blocks of channels in a blocked format, if it has these `channels`."""
    block = _BLOCKS.get(form, 1)
    return tuple(-(-d // block) * block if k == 1 and d == channels else d for k, d in enumerate(shape))


def list_candidate_formats(shape: Sequence[int], takes_padding: bool = False) -> list[str]:
    """The formats of a tensor whose kernels need no padding (or all of them), the most promising first."""
    forms = (*list_image_formats(len(shape)), "linear") if len(shape) == 4 else ("linear",)
    fitting = [f for f in dict.fromkeys(forms) if format_fits(f, len(shape))]
    return [f for f in fitting if takes_padding or find_memory_shape(f, shape) is not None]
