"""Shared by tactics that hold the weights as operand A in registers (weights_as_a.cuh): weight packing, tile widths, launches."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from whet.backends.cuda.launch import Launch
from whet.tactics._base import Args
from whet.tactics.cuda._device.arguments import Arguments, ConstFloatPointer, ConstUint4Pointer, Fields
from whet.tactics.cuda._device.kernel import launch
from whet.tactics.cuda.conv._conv import count_bias_floats

THREADS = 128
SHARED, REGISTERS = 227 * 1024, 65536


class Tile(Protocol):
    """The interface that a launch needs of an instance."""

    @property
    def shared(self) -> int:
        """Bytes of shared memory."""

    @property
    def blocks(self) -> int:
        """Blocks on a multiprocessor."""


def pack_for_registers(weights: np.ndarray) -> np.ndarray:
    """Weights [64, steps, 32] of i8 as `wgmma` takes them from registers: [step, thread, 16 bytes]. Rows r and r + 8 of a warp's 16 are
    channels 2r and 2r + 1, so that a thread's two accumulators are adjacent channels."""
    steps = weights.shape[1]
    rows = weights.reshape(4, 8, 2, steps, 2, 4, 4)  # warp, group, later, step, half, quad, byte
    return np.ascontiguousarray(rows.transpose(3, 0, 1, 5, 4, 2, 6)).reshape(steps, THREADS, 16)  # registers: half, later


def list_tile_widths(columns: int, most: int = 160) -> list[int]:
    """Widths of tiles in columns: the three that pad the fewest columns, of equal ones the widest first."""
    whole = -(-columns // 16) * 16
    candidates = {w for w in (whole, 160, 128, 112, 80, 64, 48) if w <= min(whole, most)}
    return sorted(candidates, key=lambda w: (-(-columns // w) * w, -w))[:3]


def fits_multiprocessor(registers: int, shared: int, blocks: int) -> bool:
    """True if a multiprocessor can hold `blocks` blocks of this many registers per thread and bytes of shared memory."""
    return registers <= min(255, REGISTERS // (blocks * THREADS)) and (shared + 1024) * blocks <= SHARED


@dataclass(frozen=True)
class WeightFields(Fields):
    """Weights as fragments of operand A, biases and factors."""

    weights: ConstUint4Pointer  # [STEPS][128 threads], a fragment each
    bias: ConstFloatPointer  # [KC], factors the same
    factor: ConstFloatPointer

    @staticmethod
    def of(args: Args, channels: int) -> WeightFields:
        """The first two packed operands: weights, and biases followed by the factors."""
        return WeightFields(args.packed[0], args.packed[1], args.packed[1] + count_bias_floats(channels) * 4)


def make_launches(
    entry: str, arguments: Arguments, constants: Mapping[str, int], tile: Tile, tiles: int, multiprocessors: int, label: str
) -> list[Launch]:
    """The launch of `entry` that computes `tiles` tiles."""
    return [launch(entry, arguments, constants, (min(tiles, multiprocessors * tile.blocks), 1, 1), THREADS, shared=tile.shared, label=label)]
