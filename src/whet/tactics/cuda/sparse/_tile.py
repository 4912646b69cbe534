"""The tuning space of sparse.cu: tiles, limits of a multiprocessor, and the order of candidates for a shape."""

from __future__ import annotations

from dataclasses import dataclass, fields
from itertools import product

from whet.tactics._base import Config, PlanRefused
from whet.tactics.cuda._device.arguments import SharedMemory

SHARED_LIMIT = 227 * 1024  # bytes that a block may have on Hopper
STEP_BYTES = 128  # of a pixel in a K step


@dataclass(frozen=True, order=True)
class SparseTile:
    """One instance of sparse.cu, less types, epilogue and how the input is read."""

    wgs: int  # warpgroups that multiply
    mi: int  # 64-row tiles of each
    bn: int  # pixels
    stages: int
    cluster: int = 1  # blocks that share an input tile
    blocks: int = 1  # resident blocks per multiprocessor

    @property
    def bm(self) -> int:
        """Output channels of a tile."""
        return 64 * self.wgs * self.mi

    @property
    def registers(self) -> int:
        """An estimate of the registers that a multiplying thread needs for accumulators, addresses and the epilogue."""
        return self.mi * self.bn // 2 + 32

    @property
    def moved_registers(self) -> tuple[int, int]:
        """Registers of a multiplying and of a loading thread if a loading warpgroup has to give some away (`setmaxnreg`), else zeros.

        The sum must not exceed the registers of the block at launch, when all threads have equally many: else `setmaxnreg` waits forever.
        """
        if self.registers <= _compute_equal_share(self.wgs * 4 + 1, self.blocks):
            return 0, 0
        given = _compute_equal_share(self.wgs * 4 + 4, self.blocks) * (self.wgs + 1)
        own = min(240, (given - 24) // self.wgs // 8 * 8)
        return own, given - self.wgs * own

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return self.wgs * 128 + (128 if self.moved_registers[0] else 32)

    def chunk_pixels(self, out_size: int) -> int:
        """Pixels of 64 channels that are stored at once."""
        unit = 32 if out_size == 1 else 16
        return next(n for n in (64, 96, 80, 48, 112, 160, 176, 224, 32, 16) if self.bn % n == 0 and n % unit == 0)

    def buffers(self, out_size: int, residual: bool) -> int:
        """Staging buffers of a warpgroup: the whole tile if a residual is loaded into it, else two."""
        chunks = self.mi * self.bn // self.chunk_pixels(out_size)
        return chunks if residual else min(2, chunks)

    def shared_memory(self, in_size: int, out_size: int, residual: bool) -> SharedMemory:
        """Dynamic shared memory: the ring's slots of input, values and metadata, staging buffers of results, and barriers of 8 bytes."""
        metadata, buffers = self.bm // 64 * 512 * (2 if in_size == 1 else 1), self.wgs * self.buffers(out_size, residual)
        return (
            SharedMemory()
            .region("input", self.stages * self.bn * STEP_BYTES)
            .region("values", self.stages * self.bm * 64)
            .region("results", buffers * self.chunk_pixels(out_size) * 64 * out_size)
            .region("metadata", self.stages * metadata)
            .region("full", self.stages * 8)
            .region("empty", self.stages * 8)
            .region("residual", buffers * 8)
        )

    def shared(self, in_size: int, out_size: int, residual: bool) -> int:
        """Bytes of dynamic shared memory, alignment included."""
        return self.shared_memory(in_size, out_size, residual).nbytes

    def why_invalid(self, in_size: int, out_size: int, residual: bool) -> str | None:
        """Why a Hopper multiprocessor cannot hold `blocks` of these, or None."""
        if self.bn % (32 if out_size == 1 else 16) or self.bn > 256 or self.bn // self.cluster % 8:
            return f"takes no tile of {self.bn} pixels with results of {out_size} bytes"
        if self.blocks * (self.shared(in_size, out_size, residual) + 1024) > SHARED_LIMIT + 1024:
            return f"{self} needs {self.shared(in_size, out_size, residual)} bytes of shared memory"
        if self.registers > (self.moved_registers[0] or 255) or (self.moved_registers[0] and self.blocks > 1):
            return f"{self} needs {self.registers} registers per thread"
        return None

    @property
    def config(self) -> Config:
        """The tile as a tactic's config."""
        return tuple((f.name, getattr(self, f.name)) for f in fields(self))

    @staticmethod
    def of(config: Config) -> SparseTile:
        """The tile of a config. Raises PlanRefused for one with other fields."""
        try:
            return SparseTile(**{name: int(value) for name, value in config})
        except TypeError as e:
            raise PlanRefused(f"no tile of the sparse kernels: {e}") from e

    def __str__(self) -> str:
        return f"{self.bm}x{self.bn}_w{self.wgs}_s{self.stages}_c{self.cluster}_b{self.blocks}"


def _compute_equal_share(warps: int, blocks: int) -> int:
    """Registers of a thread if all have equally many: warps share four register files of 512 per lane, given out in eights."""
    return min(255, 512 // -(-warps * blocks // 4) // 8 * 8)


_SHAPES = (
    (2, 2, 192), (2, 2, 176), (2, 2, 160), (2, 2, 128), (2, 2, 96), (2, 2, 64),
    (2, 1, 256), (2, 1, 224), (2, 1, 192), (2, 1, 176), (2, 1, 160), (2, 1, 128), (2, 1, 112), (2, 1, 96), (2, 1, 64),
    (3, 1, 192), (3, 1, 160), (3, 1, 128), (4, 1, 128), (4, 1, 96), (4, 1, 64),
    (1, 2, 128), (1, 2, 96), (1, 2, 64), (1, 1, 256), (1, 1, 128), (1, 1, 64), (1, 1, 32),
)  # fmt: skip


def estimate_us(tile: SparseTile, m: int, k: int, steps: int, multiprocessors: int) -> float:
    """A rough time in microseconds on an H200. It orders candidates and never chooses one.

    Shared memory delivers 128 bytes per clock, and each 64-row instruction reads its own operands from it: A (2 KiB) and B (64 bytes per
    pixel) for a K of 64 bytes. The copy engine writes both once per block. L2 feeds a multiprocessor with about 36 bytes per clock.
    """
    tiles_m, tiles_n = -(-k // (tile.bm * tile.cluster)) * tile.cluster, -(-m // tile.bn)
    waves = -(-tiles_m * tiles_n // (multiprocessors // tile.cluster * tile.cluster * tile.blocks))
    rows = tile.bm // 64
    reads = rows * (4096 + tile.bn * 128)
    writes = rows * (4096 + 1024) + tile.bn * 128
    fed = rows * (4096 + 1024) + tile.bn * 128 / tile.cluster
    clocks = max((reads + writes) / 128, fed / 36, 700 / tile.stages)
    epilogue = 1200 + tile.bm * tile.bn * 2 / 24
    overlap = 0.6 if tile.blocks > 1 else 1.0
    return waves * tile.blocks * (steps * clocks + overlap * epilogue) / 1.6e3 + 2.5


def pick_varied_tiles(tiles: list[SparseTile], most: int, each: int = 2) -> list[SparseTile]:
    """The first `most` tiles; at most `each` of one size before any other size has a turn."""
    counts: dict[tuple[int, int], int] = {}
    first: list[SparseTile] = []
    rest: list[SparseTile] = []
    for tile in tiles:
        size = (tile.bm, tile.bn)
        counts[size] = counts.get(size, 0) + 1
        (first if counts[size] <= each else rest).append(tile)
    return (first + rest)[:most]


def list_sparse_tiles(m: int, k: int, steps: int, in_size: int, out_size: int, residual: bool, multiprocessors: int) -> list[SparseTile]:
    """Tiles for `m` pixels, `k` output channels and `steps` K steps, sorted by estimated time.

    in_size, out_size: bytes of an element of the input and of the result.
    """
    tiles = set()
    for (wgs, mi, bn), cluster, blocks in product(_SHAPES, (1, 2), (1, 2, 3)):
        if 64 * wgs * mi * cluster >= 2 * -(-k // 64) * 64 or (bn > 32 and bn >= 2 * m):
            continue  # at least half of such a tile would be padding
        for stages in (8, 6, 5, 4, 3):
            tile = SparseTile(wgs, mi, bn, stages, cluster, blocks)
            if tile.why_invalid(in_size, out_size, residual) is None:
                tiles.add(tile)
                break
    return sorted(tiles, key=lambda t: (estimate_us(t, m, k, steps, multiprocessors), t))
