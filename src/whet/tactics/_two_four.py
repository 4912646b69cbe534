"""2:4 weights: the kept values of every group of four along K and their positions, and the reason why weights are not 2:4."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from whet.network import Tensor

_BLOCK_OF_ROWS = 1 << 22  # elements that are examined at once: bounds temporary memory
_reasons: dict[tuple[str, str], str | None] = {}  # by digest and order of the axes: each candidate asks, and large weights take a tenth of a second


def why_not_two_four(weights: Tensor, order: str, filters: Callable[[], np.ndarray]) -> str | None:
    """Why constant weights are not 2:4 along the input channels, or None.

    filters: gives them as [output channel, input channel, height, width]; `order`: everything that this depends on besides the values.
    """
    assert weights.weight is not None
    key = (weights.weight.digest, order)
    if key not in _reasons:
        _reasons[key] = _examine(filters())
    return _reasons[key]


def _examine(filters: np.ndarray) -> str | None:
    k, c, r, s = filters.shape
    if c % 4:
        return f"weights are not 2:4: {c} input channels have no whole groups of four"
    if not filters.size:
        return "weights are empty"
    violation = find_violation(filters.transpose(0, 2, 3, 1).reshape(k, -1))
    if violation is None:
        return None
    tap, first = divmod(violation.column, c)
    where = f"output channel {violation.row}, inputs {first}-{first + 3}" + (f" of filter tap ({tap // s}, {tap % s})" if r * s > 1 else "")
    return f"weights hold a NaN: {where}" if violation.nan else f"weights are not 2:4: {where} have {violation.nonzeros} non-zeros"


@dataclass(frozen=True)
class Compressed:
    """`values` [rows, K / 2] in the dtype of the weights, and `metadata` [rows, K / 4] of uint8, four bits used: the position of
    the first value in bits 0-1 and of the second in bits 2-3, the first being the smaller."""

    values: np.ndarray
    metadata: np.ndarray


@dataclass(frozen=True)
class Group:
    """A group of four with more than two non-zeros, or with a NaN: row and first column of the matrix."""

    row: int
    column: int
    nonzeros: int
    nan: bool


def find_violation(matrix: np.ndarray, block_elements: int = _BLOCK_OF_ROWS) -> Group | None:
    """The first group of four along the last axis that is not 2:4 or holds a NaN, or None. -0.0 is a zero.

    matrix: [rows, K] of any float or integer type, examined in parts of `block_elements`. Raises ValueError if K is no multiple of 4.
    """
    if matrix.shape[1] % 4:
        raise ValueError(f"rows of {matrix.shape[1]} elements have no whole groups of four")
    for start, block in _iterate_row_blocks(matrix, block_elements):
        bad = _COUNT[_compute_nonzero_mask(block)] > 2
        nan = (block != block).reshape(*bad.shape, 4).any(-1)
        bad |= nan
        if bad.any():
            row, group = (int(i) for i in np.unravel_index(int(bad.argmax()), bad.shape))
            nonzeros = np.count_nonzero(block[row, 4 * group : 4 * group + 4] != 0)
            return Group(start + row, 4 * group, int(nonzeros), bool(nan[row, group]))
    return None


def compress(matrix: np.ndarray) -> Compressed:
    """The two values and the metadata of every group of four along the last axis.

    A group with fewer than two non-zeros keeps zeros at the lowest free positions. matrix: [rows, K], any float or integer type.
    Raises ValueError if K is no multiple of 4, and for the first group that is not 2:4 or holds a NaN.
    """
    bad = find_violation(matrix)
    if bad is not None:
        where = f"row {bad.row}, columns {bad.column}-{bad.column + 3}"
        raise ValueError(f"{where} hold a NaN" if bad.nan else f"{where} have {bad.nonzeros} non-zeros; 2:4 weights have at most two")
    rows, columns = matrix.shape
    values, metadata = np.empty((rows, columns // 2), matrix.dtype), np.empty((rows, columns // 4), np.uint8)
    for start, block in _iterate_row_blocks(matrix, _BLOCK_OF_ROWS):
        positions = _POSITIONS[_compute_nonzero_mask(block)]
        kept = np.take_along_axis(block.reshape(*positions.shape[:2], 4), positions, axis=-1)
        values[start : start + len(block)] = kept.reshape(len(block), -1)
        metadata[start : start + len(block)] = positions[..., 0] | positions[..., 1] << 2
    return Compressed(values, metadata)


def _iterate_row_blocks(matrix: np.ndarray, elements: int) -> Iterator[tuple[int, np.ndarray]]:
    """(first row, rows) of parts of a matrix of at most `elements` elements, or one row."""
    rows = max(1, elements // max(1, matrix.shape[1]))
    for start in range(0, len(matrix), rows):
        yield start, matrix[start : start + rows]


def _compute_nonzero_mask(block: np.ndarray) -> np.ndarray:
    """[rows, K / 4]: bit i is set if element i of the group is not zero."""
    bits = np.packbits(block != 0, axis=-1, bitorder="little")  # eight elements per byte
    return np.stack([bits & 15, bits >> 4], axis=-1).reshape(len(block), -1)[:, : block.shape[1] // 4]


def _select_positions(mask: int) -> list[int]:
    """The two positions that a group with these non-zeros keeps: non-zeros, then zeros, each from the lowest."""
    return sorted(sorted(range(4), key=lambda i: (not mask >> i & 1, i))[:2])


_COUNT = np.array([mask.bit_count() for mask in range(16)], np.uint8)
_POSITIONS = np.array([_select_positions(mask) for mask in range(16)], np.int64)


def decompress(compressed: Compressed) -> np.ndarray:
    """The matrix [rows, K] before `compress`."""
    rows, count = compressed.metadata.shape
    out = np.zeros((rows, count, 4), compressed.values.dtype)
    pairs = compressed.values.reshape(rows, count, 2)
    for i in range(2):
        position = (compressed.metadata >> 2 * i & 3).astype(np.int64)
        np.put_along_axis(out, position[..., None], pairs[..., i : i + 1], axis=-1)
    return out.reshape(rows, count * 4)
