"""Shared by tactics that hold the weights as operand A in registers (weights_as_a.cuh): weight packing, tile widths, launches."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np

from whet.backends.cuda.launch import Launch
from whet.tactics._base import Args
from whet.tactics.cuda._device.kernel import loaded
from whet.tactics.cuda.conv._conv import Finish, bias_count
from whet.tactics.cuda.quantized._quantized import Output

THREADS = 128
SHARED, REGISTERS = 227 * 1024, 65536


class Tile(Protocol):
    """What a launch asks of an instance."""

    @property
    def shared(self) -> int:
        """Bytes of shared memory."""

    @property
    def blocks(self) -> int:
        """Blocks on a multiprocessor."""


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


def fields(args: Args, channels: int, third: int, sizes: Sequence[int], finish: Finish, out: Output, step: float, zero: int) -> bytes:
    """A kernel's arguments behind its maps: addresses (weights, biases, factors, a `third`, the result), sizes, how results end, and of
    what else is read (an image, a residual) a step and a zero point."""
    numbers = args.packed[1]
    addresses = (args.packed[0], numbers, numbers + bias_count(channels) * 4, third, args.outputs[0])
    ends = (*finish.activation[1:], out.per_step, out.zero, step, zero & 0xFFFFFFFF)
    return struct.pack(f"<5Q{len(sizes)}i5fI", *addresses, *sizes, *ends)


def launches(name: str, constants: Mapping[str, int], tile: Tile, tiles: int, multiprocessors: int, arguments: bytes, label: str) -> list[Launch]:
    """The launch of an instance of `<name>.cu` that computes so many tiles."""
    kernel = loaded(f"{name}.cu", name, tuple(sorted(constants.items())), tile.shared)
    return [Launch(kernel, (min(tiles, multiprocessors * tile.blocks), 1, 1), THREADS, arguments, label=label)]
