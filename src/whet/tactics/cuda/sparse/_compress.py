"""2:4 weights as `wgmma.mma_async.sp` reads them: the kept values of every group of four along K, and the positions of those values.

The instruction multiplies a sparse A [64 x K] by a dense B [K x N] (PTX ISA, "Asynchronous warpgroup level sparse matrix multiply").
A is stored compressed, two values of each group of four. The metadata of a group has four bits: the position of the first value in bits
0-1 and of the second in bits 2-3, the first being the smaller. One instruction takes K = 32 elements of 16 bits or K = 64 of 8 bits, and
one 32-bit metadata register of the threads that the sparsity selector names:

    16 bits  thread q of a quad (q = 0, 1) has row g = lane / 4 of its warp's sixteen, K elements 16q to 16q + 15, in the low 16 bits, and
             row g + 8 in the high 16 bits. Selector 0 reads threads 0 and 1 of each quad, selector 1 threads 2 and 3, so that one register
             holds the metadata of two instructions.
    8 bits   thread q has row g + 8 * (q % 2), K elements 32 * (q / 2) to 32 * (q / 2) + 31. All threads contribute (selector 0).
"""

from __future__ import annotations

import numpy as np

STEP_BYTES = 128  # of a row of B in a K step of the kernels
ROWS = 64  # of A that one instruction takes
THREADS = 128
EMPTY = 0b0100  # metadata of a group of zeros: positions 0 and 1


def register_metadata(metadata: np.ndarray, size: int) -> np.ndarray:
    """Metadata in the order of the threads' registers: uint32 [K step, tile of 64 rows, thread, registers].

    metadata: [rows, K / 4] with K in whole steps of STEP_BYTES / size elements; `size`: bytes of an element, 1 or 2. Rows are filled up to
    whole tiles with the metadata of zeros. A K step has two instructions: two registers of 8-bit operands, or one register of 16-bit
    operands that serves both.
    """
    step = STEP_BYTES // size // 4  # groups of a K step
    rows, groups = metadata.shape
    if groups % step:
        raise ValueError(f"{groups} groups of four are no whole K steps of {step}")
    tiles = -(-rows // ROWS)
    whole = np.full((tiles * ROWS, groups), EMPTY, np.uint32)
    whole[:rows] = metadata
    if size == 2:  # tile, warp, high half, g, K step, instruction, q, group
        parts = whole.reshape(tiles, 4, 2, 8, groups // step, 2, 2, 4)
        halves = _join_nibbles(parts)
        words = halves[:, :, 0] | halves[:, :, 1] << 16  # tile, warp, g, K step, instruction, q
        ordered = words.transpose(3, 0, 1, 2, 4, 5)  # thread of a quad: 2 * instruction + q
        return np.ascontiguousarray(ordered).reshape(groups // step, tiles, THREADS, 1)
    parts = whole.reshape(tiles, 4, 2, 8, groups // step, 2, 2, 8)  # tile, warp, row + 8, g, K step, instruction, q / 2, group
    words = _join_nibbles(parts)
    ordered = words.transpose(4, 0, 1, 3, 6, 2, 5)  # K step, tile, warp, g, q / 2, q % 2, instruction
    return np.ascontiguousarray(ordered).reshape(groups // step, tiles, THREADS, 2)


def _join_nibbles(parts: np.ndarray) -> np.ndarray:
    """The last axis, of at most eight groups, as one uint32, the first group in the lowest bits."""
    shifts = np.arange(parts.shape[-1], dtype=np.uint32) * 4
    return np.bitwise_or.reduce(parts << shifts, axis=-1).astype(np.uint32)


def pair_rows(matrix: np.ndarray) -> np.ndarray:
    """Rows (a multiple of 16) in another order: rows g and g + 8 of every sixteen are rows 2g and 2g + 1 of the matrix.

    A thread accumulates rows g and g + 8. With this order these are neighbouring channels, and kernels with 8-bit results store the pair as one unit.
    """
    parts = matrix.reshape(-1, 8, 2, *matrix.shape[1:])
    return np.ascontiguousarray(parts.swapaxes(1, 2)).reshape(matrix.shape)
