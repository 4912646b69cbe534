"""Tiles, arguments and launches of sparse_mma.cu, the 2:4 kernel for GPUs before Hopper and few pixels; packed operands are those of sparse.cu."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

from whet.backends.cuda.launch import Launch
from whet.tactics._base import Config, PlanRefused
from whet.tactics.cuda._device.arguments import ActivationParameters, Arguments, ConstFloatPointer, ConstPointer, Int32, Pointer
from whet.tactics.cuda._device.kernel import TYPE, count_blocks, launch
from whet.tactics.cuda._device.source import ACTIVATIONS
from whet.tactics.cuda.conv._conv import ConvShape, PostOps, View
from whet.tactics.cuda.sparse._compress import ROWS
from whet.tactics.cuda.sparse._launch import Packed24, step_elements

BK = step_elements(2)
MAX_SPLITS = 64
LEAST_STEPS = 2  # K steps of a split: fewer do not fill the pipeline


@dataclass(frozen=True, order=True)
class MmaTile:
    """One instance: warps along channels and pixels, tiles of 16 channels and of 8 pixels per warp, stages of the pipeline, and parts of K that
    different blocks compute."""

    wm: int
    wn: int
    mi: int
    ni: int
    stages: int
    splits: int = 1

    @property
    def bm(self) -> int:
        """Channels of a tile; a multiple of the 64 rows of packed metadata."""
        return self.wm * self.mi * 16

    @property
    def bn(self) -> int:
        """Pixels of a tile."""
        return self.wn * self.ni * 8

    @property
    def cluster(self) -> int:
        """Tiles that share an input tile; see SparseTile."""
        return 1

    @property
    def threads(self) -> int:
        return self.wm * self.wn * 32

    @property
    def shared(self) -> int:
        """Bytes of dynamic shared memory: the stages, or the results before they are stored, and what aligning them takes."""
        return max(self.stages * (self.bm * BK + self.bn * BK * 2), self.bn * (self.bm + 4) * 4) + 128

    @property
    def config(self) -> Config:
        """The tile as a tactic's config."""
        return tuple((f.name, getattr(self, f.name)) for f in fields(self))

    def __str__(self) -> str:
        return f"{self.bm}x{self.bn}_w{self.wm}x{self.wn}_s{self.stages}" + (f"_k{self.splits}" if self.splits > 1 else "")


TILES = (MmaTile(4, 2, 2, 8, 3), MmaTile(2, 2, 4, 4, 4), MmaTile(2, 2, 2, 8, 3), MmaTile(2, 2, 2, 4, 4), MmaTile(2, 2, 2, 2, 4))


def tile_of(config: Config, shared_limit: int) -> MmaTile:
    """The tile of a config. Raises PlanRefused for one that does not exist, or that a multiprocessor cannot hold."""
    tile = next((t for t in TILES if t.config[:-1] == config[:-1]), None)
    name, splits = config[-1] if config else ("", 0)
    if tile is None or tile.shared > shared_limit or name != "splits" or not isinstance(splits, int) or not 1 <= splits <= MAX_SPLITS:
        raise PlanRefused(f"no tile of the 2:4 kernel with mma.sp fits {dict(config)}")
    return replace(tile, splits=splits)


def list_mma_tiles(shape: ConvShape, multiprocessors: int, shared_limit: int) -> list[MmaTile]:
    """The tiles for a shape, those first that leave the fewest multiprocessors idle and waste the least. Where a tile has fewer blocks than there are
    multiprocessors, K is split so that there are one or two blocks for each."""
    steps, tiles = shape.steps(BK), []
    for t in TILES:
        if t.shared > shared_limit or (t.bm > 64 and t.bm >= 2 * shape.k):
            continue
        blocks = -(-shape.k // t.bm) * -(-shape.m // t.bn)
        wanted = {1, *(n * multiprocessors // blocks for n in (1, 2) if blocks < multiprocessors)}
        tiles += [replace(t, splits=s) for s in sorted({min(w, MAX_SPLITS, steps // LEAST_STEPS) for w in wanted} | {1}) if s >= 1]

    def estimate_cost(t: MmaTile) -> float:
        blocks = -(-shape.k // t.bm) * -(-shape.m // t.bn) * t.splits
        waves = -(-blocks // multiprocessors)
        work = t.bm * t.bn * (1 + 32 / t.bm + 32 / t.bn) * -(-steps // t.splits)  # products, and the bytes that a tile reads for them
        return waves * work + (0 if t.splits == 1 else 1e-3 * shape.m * shape.k * t.splits)  # and the partial sums

    return sorted(dict.fromkeys(tiles), key=estimate_cost)


@dataclass(frozen=True, kw_only=True)
class SparseMmaArguments(Arguments, kernel="sparse_mma.cu"):
    """The structure that the kernel takes."""

    partial: Pointer  # SPLIT: [split][pixel][channel] of float
    kept: ConstPointer  # [channel][K step][32]: two of every four weights, 16 bits
    metadata: ConstPointer  # [K step][64 channels][128 threads] of u32
    bias: ConstFloatPointer  # [channel], filled up to whole tiles
    input: ConstPointer
    residual: ConstPointer
    out: Pointer
    pixels: Int32  # output pixels of all samples
    h: Int32
    w: Int32
    c: Int32
    p: Int32
    q: Int32
    k: Int32
    taps_w: Int32
    stride_h: Int32
    stride_w: Int32
    pad_h: Int32
    pad_w: Int32
    dil_h: Int32
    dil_w: Int32
    steps: Int32
    tap_steps: Int32  # K steps of one filter tap
    per: Int32  # K steps of a split
    splits: Int32
    row_tiles: Int32  # 64-row tiles of the metadata
    act: ActivationParameters


def make_mma_constants(tile: MmaTile, dtype: str, post_ops: PostOps) -> dict[str, int]:
    """The macros of an instance for a storage type "f16" or "bf16"."""
    sizes = {"WM": tile.wm, "WN": tile.wn, "MI": tile.mi, "NI": tile.ni, "STAGES": tile.stages}
    kinds = {"BF16": int(dtype == "bf16"), "TO": TYPE[dtype], "ADD": TYPE[dtype]}
    kinds["SPLIT"] = int(tile.splits > 1)
    return {**sizes, **kinds, "ACT": ACTIVATIONS[post_ops.activation[0]], "RESIDUAL": post_ops.residual}


def count_partial_bytes(tile: MmaTile, shape: ConvShape) -> int:
    """Bytes of the partial sums of a tile that splits K, else 0."""
    return tile.splits * shape.m * shape.k * 4 if tile.splits > 1 else 0


def make_mma_launches(
    tile: MmaTile, shape: ConvShape, x: View, packed: Packed24, out: View, dtype: str, post_ops: PostOps, residual: int, partial: int, label: str = ""
) -> list[Launch]:
    """The launches of `shape` with addresses filled in; `packed` holds operands of `pack_sparse_operands` with this tile,
    `residual` is an address or 0, `partial` that of `count_partial_bytes`."""
    tiles_m, tiles_n = -(-shape.k // tile.bm), -(-shape.m // tile.bn)
    steps = shape.steps(BK)
    arguments = SparseMmaArguments(
        partial=partial,
        kept=packed.values,
        metadata=packed.metadata,
        bias=packed.floats,
        input=x.address,
        residual=residual,
        out=out.address,
        pixels=shape.m,
        h=shape.h,
        w=shape.w,
        c=shape.c,
        p=shape.p,
        q=shape.q,
        k=shape.k,
        **shape.window,
        steps=steps,
        tap_steps=steps // (shape.r * shape.s),
        per=-(-steps // tile.splits),
        splits=-(-steps // -(-steps // tile.splits)),
        row_tiles=tiles_m * tile.bm // ROWS,
        act=post_ops.activation[1:],
    )
    constants = make_mma_constants(tile, dtype, post_ops)
    grid = (tiles_m, tiles_n, arguments.splits)
    first = launch("sparse_mma", arguments, constants, grid, tile.threads, shared=tile.shared, label=label)
    if tile.splits == 1:
        return [first]
    return [first, launch("finish", arguments, constants, (count_blocks(shape.m * shape.k // 8, 256), 1, 1), 256, label=label)]
