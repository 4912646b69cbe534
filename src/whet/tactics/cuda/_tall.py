"""What tactics with weights as the tall operand in registers share (tall.cuh): how weights are packed, which widths of tiles are tried."""

from __future__ import annotations

import numpy as np

THREADS = 128
SHARED, REGISTERS = 227 * 1024, 65536


def registers_of(tall: np.ndarray) -> np.ndarray:
    """Weights [64, steps, 32] of i8 as `wgmma` takes them from registers: [step, thread, 16 bytes]. Rows r and r + 8 of a warp's 16 are
    channels 2r and 2r + 1, so that a thread's two sums are neighbours."""
    steps = tall.shape[1]
    rows = tall.reshape(4, 8, 2, steps, 2, 4, 4)  # warp, group, later, step, half, quad, byte
    return np.ascontiguousarray(rows.transpose(3, 0, 1, 5, 4, 2, 6)).reshape(steps, THREADS, 16)  # registers: half, later


def widths(columns: int, most: int = 160) -> list[int]:
    """Columns of tiles: of three that compute the fewest for nothing the widest first."""
    whole = -(-columns // 16) * 16
    found = {w for w in (whole, 160, 128, 112, 80, 64, 48) if w <= min(whole, most)}
    return sorted(found, key=lambda w: (-(-columns // w) * w, -w))[:3]


def held(registers: int, shared: int, blocks: int) -> bool:
    """Whether a multiprocessor holds so many blocks of so many registers a thread and bytes of shared memory."""
    return registers <= min(255, REGISTERS // (blocks * THREADS)) and (shared + 1024) * blocks <= SHARED
