"""A convolution of several taps and the following 1x1 convolution in one launch of conv_then_pointwise.cu: candidates, shared memory, the launch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product
from typing import Annotated

from whet.backends.cuda import tensormap
from whet.backends.cuda.compile import compile_cubin
from whet.backends.cuda.driver import per_device
from whet.backends.cuda.launch import MAX_SHARED, Kernel, Launch, Module
from whet.tactics.cuda._device.arguments import (
    ActivationParameters,
    Arguments,
    ConstFloatPointer,
    ConstPointer,
    Fields,
    Float32,
    Int32,
    Pointer,
    TensorMap,
    When,
)
from whet.tactics.cuda._device.source import ACTIVATIONS, emit_kernel_source
from whet.tactics.cuda.conv._conv import TYPES, Activation, ConvShape, PostOps
from whet.tactics.cuda.conv._conv_tiles import Halo

MOST_BLOCKS = 16  # of a cluster
_FEW = 112 * 1024  # bytes of shared memory that leave enough for the next layer's weights
_REGISTERS = 232  # limit of a thread's registers: accumulators, residual and _NEEDED
_NEEDED = 60


@dataclass(frozen=True)
class IntegerScales(Fields):
    """Scales of the two products of integers, as in conv.cu."""

    factor: ConstFloatPointer = 0  # real value of a step of each channel's sum, in parts of the range
    factor2: ConstFloatPointer = 0
    per_step: Float32 = 1.0
    zero: Float32 = 0.0
    per_step2: Float32 = 1.0
    zero2: Float32 = 0.0
    add_step: Float32 = 1.0


@dataclass(frozen=True)
class ConvThenPointwiseArguments(Arguments, kernel="conv_then_pointwise.cu"):
    a: TensorMap  # input, weights of both
    b: TensorMap
    b2: TensorMap
    bias: ConstFloatPointer  # [inner channels]
    bias2: ConstFloatPointer  # [CL * BN2]
    residual: ConstPointer
    out: Pointer
    res_pitch: Int32  # elements from pixel to pixel
    out_pitch: Int32
    csteps: Int32  # K steps of one tap in all blocks
    width: Int32
    wide: Int32
    rows: Int32
    height: Int32
    pad_h: Int32
    pad_w: Int32
    slot_bytes: Int32  # bytes of an input tile: in shared memory, and of a copy
    box_bytes: Int32
    has_residual: Int32  # 1: added before the activation, 2: after it
    act: ActivationParameters
    act2: ActivationParameters
    integers: Annotated[IntegerScales | None, When("IN8")] = None


@dataclass(frozen=True, order=True)
class Tile:
    """One instance of conv_then_pointwise.cu, less activations, type and filter."""

    pixels: int  # of a cluster, including row padding
    sk: int  # blocks that share the input channels of the first convolution
    groups: int  # groups of 64 of its output channels, each computed by one block (or by the blocks that split its input channels)
    mi: int  # 64s of the second convolution's output channels that a block makes
    bk: int = 64  # channels of a K step of the first
    stages: int = 4  # slots of the weight ring
    size: int = 2  # bytes of an element

    @property
    def cluster(self) -> int:
        """Blocks that share pixels: all channels of both."""
        return self.sk * self.groups

    def chunks(self, shape: ConvShape) -> int:
        """K steps of one filter tap in a block."""
        return shape.c // (self.bk * self.sk)

    @property
    def row(self) -> int:
        """Bytes of a pixel in a K step of the first."""
        return self.bk * self.size

    @property
    def panel(self) -> int:
        """Bytes of a pixel in a K step of the second convolution, as WIDE in conv_then_pointwise.cu."""
        return 64 if self.groups * self.size % 2 else 128

    @property
    def late(self) -> int:
        """Weight slots of the second product that a block reads."""
        return self.groups * 64 * self.size // self.panel * self.mi

    def steps(self, shape: ConvShape) -> int:
        """Weight slots that a block reads in all."""
        return self.chunks(shape) * shape.r * shape.s + self.late

    def __str__(self) -> str:
        return f"{self.pixels}x64x{self.bk}_c{self.cluster}_k{self.sk}_m{self.mi}_s{self.stages}" + "_8bit" * (self.size == 1)


def find_halo(shape: ConvShape, tile: Tile) -> Halo | str:
    """The layout of a tile's pixels, or the reason why none fits."""
    if shape.stride != (1, 1) or shape.dilation != (1, 1) or shape.r * shape.s == 1:
        return "input tiles with all taps take filters of several taps, stride 1 and no dilation"
    wide, row = shape.q + shape.s - 1, tile.row
    rows = min(shape.p, (tile.pixels - shape.q) // wide + 1) if tile.pixels >= shape.q else 0
    if rows < 1 or wide > 256 or rows + shape.r - 1 > 256:
        return f"a row of {shape.q} pixels does not fit a tile of {tile.pixels}"
    read = max((rows + shape.r - 1) * wide, tile.pixels + (shape.r - 1) * wide + shape.s - 1)
    return Halo(wide, rows, -(-read * row // 1024) * 1024, (rows + shape.r - 1) * wide * row)


def count_shared_bytes(shape: ConvShape, tile: Tile, halo: Halo) -> int:
    """Bytes of dynamic shared memory, alignment slack included; mirrors conv_then_pointwise.cu."""
    parts = tile.sk * 32 * (tile.pixels // tile.sk * 2 + 4) * 4
    between = tile.groups * tile.pixels * 64 * tile.size
    return 1024 + tile.stages * 8192 + between + tile.chunks(shape) * (halo.slot + 8) + parts + tile.stages * 16 + 16


def why_not_tile(tile: Tile, shape: ConvShape, k2: int) -> str | None:
    """The reason why a tile cannot run `shape` and a following product to k2 channels, or None."""
    halo = find_halo(shape, tile)
    if isinstance(halo, str):
        return halo
    if not 1 < tile.cluster <= MOST_BLOCKS or 64 * tile.groups != shape.k or 64 * tile.mi * tile.cluster != k2:
        return f"{tile} does not divide {shape.k} and {k2} channels"
    if tile.mi not in (1, 2, 4) or tile.row not in (32, 64, 128):
        return f"{tile}: takes 64, 128 or 256 channels of a result, and K steps of 32, 64 or 128 bytes"
    if tile.size == 1 and tile.cluster % 2:
        return f"{tile}: takes an even number of destination blocks for sixteen 8-bit channels"
    if shape.c % (tile.bk * tile.sk) or tile.pixels % (8 * tile.sk) or tile.pixels % 16 or tile.pixels > 256:
        return f"{tile} does not divide {shape.c} input channels and {tile.pixels} pixels"
    if tile.pixels * (64 * tile.mi + 4) * 4 > tile.stages * 8192 or tile.stages < 2:
        return f"{tile} has too little shared memory to transpose its results"
    held = 5 if tile.size == 2 else 3  # registers of a pixel of the result: its index and its residual
    if tile.mi * tile.pixels // 2 + tile.pixels * tile.mi // 16 * held + _NEEDED * 3 // (1 + tile.size) > _REGISTERS:
        return f"{tile} needs too many registers"
    need = count_shared_bytes(shape, tile, halo)
    return f"needs {need} bytes of shared memory" if need > MAX_SHARED else None


def list_product_tiles(shape: ConvShape, k2: int, multiprocessors: int, size: int = 2) -> list[Tile]:
    """Candidates for elements of `size` bytes, the most promising first; none if the pixels need more than one wave of clusters."""
    tiles: dict[Tile, float] = {}
    if shape.k % 64 or k2 % 64:
        return []
    for pixels, row, sk in product((16, 32, 48, 64, 96, 128), (128, 64, 32), (1, 2, 4, 8)):
        groups, bk = shape.k // 64, row // size
        if k2 % (64 * sk * groups) or (row < 128 and shape.c % (2 * bk * sk) == 0):
            continue
        base = Tile(pixels, sk, groups, k2 // (64 * sk * groups), bk, size=size)
        halo = find_halo(shape, base)
        if isinstance(halo, str) or halo.rows * halo.wide + 24 <= pixels - (8 * sk if sk > 1 else 16):
            continue
        blocks = shape.n * -(-shape.p // halo.rows) * base.cluster
        if blocks > 2 * multiprocessors:
            continue
        for stages in sorted({min(s, base.steps(shape)) for s in (4, 6, 9, 11, 13, 18, 22)}):
            tile = replace(base, stages=stages)
            if why_not_tile(tile, shape, k2) is None:
                tiles[tile] = _estimate(tile, shape, halo, blocks, multiprocessors)
    return sorted(tiles, key=lambda t: (tiles[t], t))


def _estimate(tile: Tile, shape: ConvShape, halo: Halo, blocks: int, multiprocessors: int) -> float:
    """A rough time in us, which only orders candidates.

    A 16-channel product of 64 by up to 64 takes about 34 cycles, shared memory of other blocks takes in 17 bytes a cycle.
    """
    first = tile.steps(shape) - tile.late
    late = max(0, first - tile.stages) * 64 * tile.row / 83
    cycles = (first * tile.row // 32 + tile.late * tile.panel // 32) * max(22.0, 16 + tile.pixels / 3.6)
    exchange = (tile.pixels // tile.sk * 64 * 4 * (tile.sk - 1) + tile.pixels * shape.k * tile.size) / 17
    crowded = 0 if count_shared_bytes(shape, tile, halo) <= _FEW else 500
    turns = -(-blocks // (2 * multiprocessors if crowded == 0 else multiprocessors))
    each = max(late, cycles / 1.9) + exchange / 1.9 + tile.chunks(shape) * halo.box / 83 + tile.pixels * tile.mi * 5
    return (1700 + turns * each + crowded) / 1000


@dataclass(frozen=True)
class Integers:
    """Types of a launch on integers (`source` of the input and of the first result, `residual`), and the scales of both products."""

    source: str
    residual: str
    scales: IntegerScales = IntegerScales()


def emit_product_source(tile: Tile, shape: ConvShape, inner: str, activation: str, bf16: bool, integers: Integers | None = None) -> str:
    """The kernel's complete text; `inner` is the activation between the two."""
    types8 = {"IN8": 0} if integers is None else {"IN8": TYPES[integers.source], "ADD": TYPES[integers.residual], "WEIGHTS_AS_A": 1}
    return emit_kernel_source(
        "conv_then_pointwise.cu",
        {
            "BN": tile.pixels,
            "BK": tile.bk,
            "SK": tile.sk,
            "GROUPS": tile.groups,
            "MI": tile.mi,
            "STAGES": tile.stages,
            "CHUNKS": tile.chunks(shape),
            "TAPS_H": shape.r,
            "TAPS_W": shape.s,
            "ACT": ACTIVATIONS[inner],
            "ACT2": ACTIVATIONS[activation],
            "BF16": int(bf16),
            **types8,
        },
    )


@per_device
def _load_kernel(text: str) -> Kernel:
    return Module(compile_cubin(text, name="conv_then_pointwise.cu")).kernel("conv_then_pointwise", MAX_SHARED)


def make_product_launch(
    tile: Tile,
    shape: ConvShape,
    k2: int,
    addresses: tuple[int, int, int, int, int, int],
    residual: int,
    inner: Activation,
    post_ops: PostOps,
    bf16: bool,
    label: str,
    integers: Integers | None = None,
) -> Launch:
    """The launch of `shape` and the product to k2 channels. Addresses: input, weights and bias of both, result; residual or 0."""
    x, weights, bias, weights2, bias2, out = addresses
    dtype, halo = "u8" if integers else "bf16" if bf16 else "f16", find_halo(shape, tile)
    assert isinstance(halo, Halo), halo
    pixel, taps, inside = shape.c * tile.size, shape.r * shape.s, shape.k * tile.size
    box = (tile.bk, halo.wide, halo.rows + shape.r - 1, 1)
    a = tensormap.make_tiled_map(x, dtype, (shape.c, shape.w, shape.h, shape.n), (pixel, pixel * shape.w, pixel * shape.w * shape.h), box)
    b = tensormap.make_tiled_map(weights, dtype, (taps * shape.c, shape.k), (taps * pixel,), (tile.bk, 64))
    b2 = tensormap.make_tiled_map(weights2, dtype, (shape.k, k2), (inside,), (tile.panel // tile.size, 64))
    arguments = ConvThenPointwiseArguments(
        a,
        b,
        b2,
        bias,
        bias2,
        residual,
        out,
        res_pitch=k2 if residual else 0,
        out_pitch=k2,
        csteps=shape.c // tile.bk,
        width=shape.q,
        wide=halo.wide,
        rows=halo.rows,
        height=shape.p,
        pad_h=shape.pad[0],
        pad_w=shape.pad[1],
        slot_bytes=halo.slot,
        box_bytes=halo.box,
        has_residual=(post_ops.residual or 1) if residual else 0,
        act=inner[1:],
        act2=post_ops.activation[1:],
        integers=None if integers is None else integers.scales,
    )
    kernel = _load_kernel(emit_product_source(tile, shape, inner[0], post_ops.activation[0], bf16, integers))
    grid = shape.n * -(-shape.p // halo.rows) * tile.cluster
    shared = count_shared_bytes(shape, tile, halo)
    return Launch(kernel, (grid, 1, 1), 160, arguments.pack(), cluster=tile.cluster, label=label, shared=shared)
