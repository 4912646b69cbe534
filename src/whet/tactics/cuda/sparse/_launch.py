"""Packed operands of sparse.cu, its tensor maps, and the launch for one shape, tile and addresses."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from whet.backends.cuda import tensormap
from whet.backends.cuda.compile import compile_cubin
from whet.backends.cuda.driver import per_device
from whet.backends.cuda.launch import Kernel, Launch, Module
from whet.tactics._two_four import compress
from whet.tactics.cuda._device.arguments import ActivationParameters, Arguments, ConstFloatPointer, ConstPointer, Float32, Int32, TensorMap
from whet.tactics.cuda._device.source import ACTIVATIONS
from whet.tactics.cuda.conv._conv import NO_POST_OPS, TYPES, ConvShape, PostOps, View, pack_weights
from whet.tactics.cuda.conv._window_map import make_window_map
from whet.tactics.cuda.sparse._compress import ROWS, STEP_BYTES, pair_rows, register_metadata
from whet.tactics.cuda.sparse._kernel_text import emit_sparse_source
from whet.tactics.cuda.sparse._tile import SparseTile


@dataclass(frozen=True)
class Types:
    """Types of the input and of the result by name (a key of TYPES), of an 8-bit residual, and FOLD of sparse.cu."""

    source: str
    result: str
    residual: str = ""
    fold: bool = False

    @property
    def in_size(self) -> int:
        """Bytes of an input element."""
        return 1 if TYPES[self.source] >= 3 else 2

    @property
    def out_size(self) -> int:
        """Bytes of an element of the result."""
        return 1 if TYPES[self.result] >= 3 else 2


@dataclass(frozen=True)
class Scales:
    """Steps of a real number and zero point of 8-bit results; an 8-bit residual is integer * add_step + add_shift."""

    per_step: float = 1.0
    zero: float = 0.0
    add_step: float = 1.0
    add_shift: float = 0.0


@dataclass(frozen=True, kw_only=True)
class SparseArguments(Arguments, kernel="sparse.cu"):
    """The structure that the kernel takes."""

    a: TensorMap  # values
    b: TensorMap  # input
    d: TensorMap  # output
    r: TensorMap  # residual
    metadata: ConstPointer  # [K step][64 rows][128 threads][REGISTERS] of u32
    bias: ConstFloatPointer  # [channel], filled up to whole tiles
    factor: ConstFloatPointer  # 8-bit input: real value of a step of the accumulator, [channel]
    steps: Int32  # K steps: all
    tap_steps: Int32  # K steps of one filter tap
    taps_w: Int32  # filter width
    pixels: Int32  # output pixels of an image
    width: Int32  # output width
    stride_h: Int32
    stride_w: Int32
    pad_h: Int32
    pad_w: Int32
    dil_h: Int32
    dil_w: Int32
    row_tiles: Int32  # 64-row tiles of the metadata
    units: Int32  # clusters of tiles in all
    units_m: Int32  # and along the channels
    tiles_n: Int32  # pixel tiles
    group: Int32  # units along the channels that are computed for one pixel tile after the other: locality in L2
    act: ActivationParameters
    per_step: Float32  # 8-bit results: steps of a real value
    zero: Float32  # zero point
    add_step: Float32  # 8-bit residual: real = integer * step + shift
    add_shift: Float32


@dataclass(frozen=True)
class Packed24:
    """Addresses of packed operands: values, metadata, biases followed by factors."""

    values: int
    metadata: int
    floats: int


class RowTile(Protocol):
    """What the packed operands depend on: output channels of a tile, and tiles that are computed together."""

    @property
    def bm(self) -> int: ...

    @property
    def cluster(self) -> int: ...


def count_padded_rows(tile: RowTile, channels: int) -> int:
    """Channels of all tiles, those beyond the last output channel included."""
    unit = tile.bm * tile.cluster
    return -(-channels // unit) * unit


def step_elements(in_size: int) -> int:
    """Elements of a pixel in a K step."""
    return STEP_BYTES // in_size


def pack_sparse(weights: np.ndarray, tile: RowTile, in_size: int, paired: bool) -> tuple[np.ndarray, np.ndarray]:
    """(values, metadata) of filters [k, c, r, s]; channels of each filter tap are filled up to whole K steps.

    `paired`: rows in the order that 8-bit results need. Raises ValueError for weights that are not 2:4 along the input channels.
    """
    rows = pack_weights(weights, step_elements(in_size), weights.dtype).reshape(len(weights), -1)
    if paired:
        whole = np.zeros((-(-len(rows) // 16) * 16, rows.shape[1]), rows.dtype)
        whole[: len(rows)] = rows
        rows = pair_rows(whole)
    compressed = compress(rows)
    words = register_metadata(compressed.metadata, in_size)
    tiles = count_padded_rows(tile, len(weights)) // ROWS
    metadata = np.zeros((words.shape[0], tiles, *words.shape[2:]), np.uint32)
    metadata[:, : words.shape[1]] = words
    return compressed.values, metadata


def pack_floats(tile: RowTile, bias: np.ndarray, factor: np.ndarray | None = None) -> np.ndarray:
    """Biases [k], then factors [k] (ones by default), each filled up to whole tiles, float32."""
    out = np.zeros((2, count_padded_rows(tile, len(bias))), np.float32)
    out[0, : len(bias)] = bias
    out[1, : len(bias)] = 1 if factor is None else factor
    return out


def make_sparse_constants(tile: SparseTile, types: Types, im2col: bool, post_ops: PostOps) -> dict[str, int]:
    """The macros of an instance."""
    size, residual = types.out_size, post_ops.residual > 0
    return {
        "WGS": tile.wgs,
        "MI": tile.mi,
        "BN": tile.bn,
        "STAGES": tile.stages,
        "CLUSTER": tile.cluster,
        "BLOCKS": tile.blocks,
        "REGS": tile.moved_registers[0],
        "LOADER_REGS": tile.moved_registers[1],
        "PX": tile.chunk_pixels(size),
        "BUFFERS": tile.buffers(size, residual),
        "IM2COL": int(im2col),
        "ACT": ACTIVATIONS[post_ops.activation[0]],
        "RESIDUAL": post_ops.residual,
        "IN": TYPES[types.source],
        "TO": TYPES[types.result],
        "ADD": TYPES[types.residual or types.result],
        "FOLD": int(types.fold),
        "BF16": int(types.result == "bf16"),
        **tile.shared_memory(types.in_size, size, residual).constants(),
    }


@per_device
def _load_instance(constants: tuple[tuple[str, int], ...], shared: int) -> Kernel:
    return Module(compile_cubin(emit_sparse_source(dict(constants)), name="sparse.cu")).kernel("sparse", shared)


def compute_band(tile: SparseTile, in_size: int, units_m: int, multiprocessors: int) -> int:
    """Units along the channels that share a pass over the pixels, so that blocks at work together read the fewest bytes."""
    weights = tile.bm * tile.cluster * (in_size / 2 + 1 / 8)
    best = math.sqrt(multiprocessors / tile.cluster * tile.bn * in_size / weights)
    return max(1, min(units_m, round(best)))


def make_sparse_launch(
    tile: SparseTile,
    shape: ConvShape,
    x: View,
    packed: Packed24,
    out: View,
    types: Types,
    *,
    residual: View | None = None,
    post_ops: PostOps = NO_POST_OPS,
    scales: Scales | None = None,
    multiprocessors: int,
    label: str = "",
) -> Launch:
    """The launch of `shape` with addresses filled in; the operands in `packed` are those of pack_sparse and pack_floats with this tile."""
    size, bk = types.in_size, step_elements(types.in_size)
    source = "u8" if size == 1 else types.source
    stored = "u8" if types.out_size == 1 else types.result
    steps, part = shape.steps(bk), tile.bn // tile.cluster
    rows = -(-shape.k // 16) * 16 if types.out_size == 1 else shape.k
    a = tensormap.make_tiled_map(packed.values, source, (steps * bk // 2, rows), (steps * STEP_BYTES // 2,), (bk // 2, tile.bm))
    b = make_window_map(shape, x, source, bk, part)
    box = (64, tile.chunk_pixels(types.out_size))
    d = tensormap.make_tiled_map(out.address, stored, (shape.k, shape.m), (out.pitch * types.out_size,), box)
    added = residual if residual is not None else out
    r = tensormap.make_tiled_map(added.address, stored, (shape.k, shape.m), (added.pitch * types.out_size,), box)
    channels = count_padded_rows(tile, shape.k)
    units_m, tiles_n = channels // (tile.bm * tile.cluster), -(-shape.m // tile.bn)
    n8 = Scales() if scales is None else scales
    arguments = SparseArguments(
        a=a,
        b=b,
        d=d,
        r=r,
        metadata=packed.metadata,
        bias=packed.floats,
        factor=packed.floats + channels * 4,
        steps=steps,
        tap_steps=steps // (shape.r * shape.s),
        pixels=shape.p * shape.q,
        width=shape.q,
        **shape.window,
        row_tiles=channels // ROWS,
        units=units_m * tiles_n,
        units_m=units_m,
        tiles_n=tiles_n,
        group=compute_band(tile, size, units_m, multiprocessors),
        act=post_ops.activation[1:],
        per_step=n8.per_step,
        zero=n8.zero,
        add_step=n8.add_step,
        add_shift=n8.add_shift,
    )
    grid = min(units_m * tiles_n, multiprocessors * tile.blocks // tile.cluster) * tile.cluster
    post_ops = post_ops if residual is not None else PostOps(post_ops.activation)
    constants = make_sparse_constants(tile, types, not shape.plain, post_ops)
    kernel = _load_instance(tuple(sorted(constants.items())), tile.shared(size, types.out_size, residual is not None))
    return Launch(kernel, (grid, 1, 1), tile.threads, arguments.pack(), cluster=tile.cluster, label=label)
