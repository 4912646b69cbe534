"""Host side of few_channel.cu (convolutions of few channels by image tiles): which tiles fit, how weights are packed, and the launch."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Annotated

import numpy as np

from whet.backends.cuda import tensormap
from whet.backends.cuda.launch import Launch
from whet.network import Tensor
from whet.network.types import DType
from whet.tactics._base import Config, Packed
from whet.tactics.cuda._device.arguments import (
    ActivationParameters,
    Arguments,
    ConstFloatPointer,
    ConstUint4Pointer,
    Fields,
    Int32,
    TensorMap,
    Uint4Pointer,
    When,
)
from whet.tactics.cuda._device.kernel import ACTIVATIONS, launch, make_packed_array
from whet.tactics.cuda._device.source import emit_kernel_source
from whet.tactics.cuda.conv._conv import Activation, ConvShape, PostOps, permute_rows
from whet.tactics.cuda.conv._conv_config import REGISTERS, SHARED_LIMIT

# Output rows and columns of a block; larger ones (16x16, 8x32, 4x32) came within a hundredth of the fastest at no layer of YOLOv5s, whole or cut.
_TILES = ((8, 16), (4, 16), (8, 8), (16, 8))
# Further tiles after a 1x1: rows and columns of a group's tile, rows of 16 pixels per warp, groups of a block. Each is the best of some layer,
# alone or in the network: 8x32 by four rows, 0.8 % slower alone, took 17.0 us of a YOLOv5s with 40 % cut; the fastest without it took 18.8.
_DEALT = ((8, 16, 2, 1), (16, 16, 4, 1), (8, 32, 4, 1), (8, 16, 2, 4), (8, 16, 2, 3), (16, 16, 4, 4), (4, 16, 1, 5))
_CHANNELS = (16, 32, 64)
_MOST = 24  # configurations


@dataclass(frozen=True)
class FrontFields(Fields):
    """The 1x1 convolution that computes the input."""

    front: TensorMap  # boxes of 64 x C of [C][64]
    front_bias: ConstFloatPointer
    h: Int32  # size of the input image
    w: Int32
    front_act: ActivationParameters


@dataclass(frozen=True)
class FewChannelArguments(Arguments, kernel="few_channel.cu"):
    input: TensorMap  # boxes of 64 x COLUMNS / PACK x ROWS x 1, and of 64 x BN of [k][CHUNKS * 64]
    weights: TensorMap
    bias: ConstFloatPointer
    residual: ConstUint4Pointer
    out: Uint4Pointer
    p: Int32
    q: Int32
    k: Int32
    pad_h: Int32
    pad_w: Int32
    tiles_h: Int32
    tiles_w: Int32
    tiles: Int32
    tiles_n: Int32
    act: ActivationParameters
    first: Annotated[FrontFields | None, When("FRONT")] = None


@dataclass(frozen=True, order=True)
class FewChannelTile:
    """One instance of few_channel.cu for a shape: rows and columns of a block's output pixels, output channels, input tiles at a time, blocks.

    A warp takes `run` rows of 16 pixels below each other; a block's `groups` have tiles of their own.
    With `front` the input comes through a 1x1 convolution of as many channels.
    """

    th: int
    tw: int
    bn: int
    slots: int = 2
    blocks: int = 1
    run: int = 1
    groups: int = 1
    front: bool = field(default=False, kw_only=True)

    @classmethod
    def of(cls, config: Config, *, front: bool = False) -> FewChannelTile:
        """The tile of `config`."""
        n = {name: int(value) for name, value in config}
        return cls(n["th"], n["tw"], n["bn"], n["slots"], n["blocks"], n.get("run", 1), n.get("groups", 1), front=front)

    @property
    def config(self) -> Config:
        """The engine's record of the configuration."""
        more = tuple((name, value) for name, value in (("run", self.run), ("groups", self.groups)) if value > 1)
        return (("th", self.th), ("tw", self.tw), ("bn", self.bn), ("slots", self.slots), ("blocks", self.blocks), *more)

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return self.th * self.tw * 2 // self.run * self.groups

    @property
    def permuted(self) -> bool:
        """True if rows of the weights are permuted in groups of 32."""
        return self.bn % 32 == 0

    def box(self, s: ConvShape) -> tuple[int, int]:
        """Rows of 128 bytes and image rows of an input tile."""
        packed = 64 // s.c
        return -(-(count_leading_pixels(s) + (self.tw - 1) * s.stride[1] + s.s) // packed), (self.th - 1) * s.stride[0] + s.r

    def shared(self, s: ConvShape) -> int:
        """Bytes of shared memory; mirrors few_channel.cu."""
        wide, tall = self.box(s)
        slot = -(-wide * tall // 8) * 1024
        weights = count_k_chunks(s) * self.bn * 128 + self.bn * 4 + (s.c * 128 + s.c * 4 if self.front else 0)
        return 1024 + weights + self.groups * (self.slots + self.front) * slot + 8 + self.groups * self.slots * 8

    def why_not(self, s: ConvShape) -> str | None:
        """Why a multiprocessor cannot hold it, or None."""
        if self.tw * s.stride[1] % (64 // s.c) or max(self.box(s)) > 256:
            return f"tiles of {self.th} x {self.tw} do not start at whole rows of 128 bytes, or are too large"
        if self.run > 1 and (s.stride[0] != 1 or self.th % self.run or self.tw % 16 or self.threads // self.groups % 128 or not self.permuted):
            return f"tiles of {self.th} x {self.tw} do not divide into warps of {self.run} rows of 16 pixels"
        registers = self.bn * 3 // 4 + 40 if self.run == 1 else self.bn // 2 * self.run + 56  # accumulators, a residual, fragments, addresses
        if self.blocks * (self.shared(s) + 1024) > SHARED_LIMIT + 1024 or self.blocks * self.threads * registers > REGISTERS or self.threads > 1024:
            return f"a multiprocessor cannot hold {self.blocks} blocks of {self}"
        return None

    def source(self, s: ConvShape, post_ops: PostOps, bf16: bool, front: Activation | None = None, adds_input: bool = False) -> str:
        """The kernel's complete text."""
        return emit_kernel_source("few_channel.cu", self.constants(s, post_ops, bf16, front, adds_input))

    def constants(self, s: ConvShape, post_ops: PostOps, bf16: bool, front: Activation | None = None, adds_input: bool = False) -> dict[str, int]:
        """The macros of the instance; `front` is the activation of the 1x1 convolution, `adds_input`: the residual is its input."""
        tile = {"TH": self.th, "TW": self.tw, "BN": self.bn, "SLOTS": self.slots, "BLOCKS": self.blocks}
        shape = {"C": s.c, "R": s.r, "S": s.s, "STRIDE_H": s.stride[0], "STRIDE_W": s.stride[1], "LEAD": count_leading_pixels(s)}
        more = {} if front is None else {"FRONT": 1, "FRONT_ACT": ACTIVATIONS[front[0]], "FRONT_HALVED": int(is_halved(PostOps(front))), "BN2": s.c}
        ends = {"ACT": ACTIVATIONS[post_ops.activation[0]], "HALVED": int(is_halved(post_ops)), "RESIDUAL": post_ops.residual}
        if self.run > 1:
            more |= {"RUN": self.run, "OWN": int(adds_input and self.permuted)}
        if self.groups > 1:
            more |= {"GROUPS": self.groups}
        return {**tile, **shape, **more, **ends, "BF16": int(bf16)}

    def __str__(self) -> str:
        more = f" r{self.run}" * (self.run > 1) + f" g{self.groups}" * (self.groups > 1)
        return f"{self.th}x{self.tw}x{self.bn} s{self.slots} b{self.blocks}{more}"


@dataclass(frozen=True)
class Front:
    """The preceding 1x1 convolution: addresses of its packed weights and bias, its activation, and if its input is the residual of the second."""

    weights: int
    bias: int
    activation: Activation
    added: bool = False


def make_few_channel_launch(
    tile: FewChannelTile,
    s: ConvShape,
    addresses: tuple[int, int, int, int, int],
    post_ops: PostOps,
    dtype: str,
    multiprocessors: int,
    label: str,
    front: Front | None = None,
) -> Launch:
    """The launch of `s`; `addresses` are those of input, packed weights, packed bias, residual (0: none) and result."""
    x, weights, bias, residual, out = addresses
    constants = tile.constants(s, post_ops, dtype == "bf16", None if front is None else front.activation, front is not None and front.added)
    row, line, (wide, tall) = count_k_chunks(s) * 64, s.w * s.c * 2, tile.box(s)
    pixels = tensormap.make_tiled_map(x, dtype, (64, s.w * s.c // 64, s.h, s.n), (128, line, line * s.h), (64, wide, tall, 1))
    filters = tensormap.make_tiled_map(weights, dtype, (row, filter_rows(s.k, tile.permuted)), (row * 2,), (64, tile.bn))
    tiles_h, tiles_w, tiles_n = -(-s.p // tile.th), -(-s.q // tile.tw), -(-s.k // tile.bn)
    tiles = s.n * tiles_h * tiles_w
    if front is not None:
        front_map = tensormap.make_tiled_map(front.weights, dtype, (64, s.c), (128,), (64, s.c))
        first = FrontFields(front_map, front_bias=front.bias, h=s.h, w=s.w, front_act=front.activation[1:])
    arguments = FewChannelArguments(
        pixels,
        filters,
        bias,
        residual,
        out,
        p=s.p,
        q=s.q,
        k=s.k,
        pad_h=s.pad[0],
        pad_w=s.pad[1],
        tiles_h=tiles_h,
        tiles_w=tiles_w,
        tiles=tiles,
        tiles_n=tiles_n,
        act=post_ops.activation[1:],
        first=None if front is None else first,
    )
    grid = max(1, min(-(-tiles // tile.groups), multiprocessors * tile.blocks // tiles_n)) * tiles_n  # a block's tiles have the same output channels
    return launch("few_channel", arguments, constants, (grid, 1, 1), tile.threads, shared=tile.shared(s), label=label)


def why_not_few_channel(s: ConvShape, front: bool = False) -> str | None:
    """Why the kernel cannot compute a convolution, or None."""
    if s.c not in _CHANNELS or s.w * s.c % 64:
        return f"{s.c} channels, {s.w} pixels per row; takes 16, 32 or 64 channels and rows of a multiple of 128 bytes"
    if s.k % 8 or s.k > 256:
        return f"{s.k} output channels; takes a multiple of 8 up to 256"
    if s.dilation != (1, 1) or not 1 < s.r * s.s <= 49 or max(s.stride) > 2:
        return f"filter {s.r} x {s.s}, strides {s.stride}; takes 2 to 49 taps, strides up to 2 and no dilation"
    return None if any(t.why_not(s) is None for t in _list_tiles(s, front)) else "the weights and two input tiles exceed shared memory"


def list_few_channel_tiles(s: ConvShape, multiprocessors: int, front: bool = False) -> list[FewChannelTile]:
    """Candidates, the most promising first: of each tile as many blocks as fit."""
    tiles: dict[FewChannelTile, FewChannelTile] = {}
    for t in _list_tiles(s, front):
        if t.why_not(s) is None:
            tiles.setdefault(replace(t, blocks=1), t)
    return sorted(tiles.values(), key=lambda t: (_estimate_us(t, s, multiprocessors), t))[:_MOST]


def _list_tiles(s: ConvShape, front: bool) -> list[FewChannelTile]:
    widest = min(64, -(-s.k // 16) * 16)
    fewer = [32] if widest == 64 and not front and 0 < s.k % 64 <= 32 else []  # if tiles of 64 would waste half of one
    widths = [widest, *fewer, *([80] if s.k > 64 and s.k % 80 == 0 else [])]
    tiles = [(th, tw) for th, tw in _TILES if (th < 2 * s.p and tw < 2 * s.q) or th == tw == 8]
    ways = [(*tile, 1, 1) for tile in tiles]
    if front and s.stride == (1, 1):
        ways += [way for way in _DEALT if way[0] < 2 * s.p and way[1] < 2 * s.q]
    return [
        FewChannelTile(th, tw, bn, slots, blocks, run, groups, front=front)
        for bn in widths
        for th, tw, run, groups in ways
        for slots in (2, 1)
        for blocks in ((6, 5, 4, 3, 2, 1) if groups == 1 else (1,))
    ]


def _estimate_us(t: FewChannelTile, s: ConvShape, multiprocessors: int) -> float:
    """A rough time in us on an H200, which only orders candidates.

    The blocks of a multiprocessor share its bandwidth to the L2 cache (60 bytes/ns), its tensor cores and its special functions; from the arrival
    of a tile to its end a block takes about 700 ns.
    """
    wide, tall = t.box(s)
    tiles = s.n * -(-s.p // t.th) * -(-s.q // t.tw) * -(-s.k // t.bn)
    at_once = t.blocks * t.groups
    turns = -(-tiles // (multiprocessors * at_once))
    pixels, touched = t.th * t.tw, wide * tall * 64 // s.c
    products = pixels / 64 * s.r * s.s * s.c / 16 * max(20 - 4 * (t.run > 1), t.bn // 2) / 1.8 + pixels * t.bn * 0.07
    if t.front:
        products += touched / 64 * s.c / 16 * max(20, s.c // 2) / 1.8 + touched * s.c * 0.07
    work = max((wide * tall * 128 + pixels * t.bn * 2) / 60, products)
    return (count_k_chunks(s) * t.bn * 128 / 80 + turns * (at_once * work + (700 if t.slots == 2 else 1300))) / 1000


def count_leading_pixels(s: ConvShape) -> int:
    """Pixels that an input tile has in front of its windows, so that it begins with a whole row of 128 bytes."""
    return -s.pad[1] % (64 // s.c)


def count_k_chunks(s: ConvShape) -> int:
    """Rows of 64 elements of K."""
    return -(-s.r * s.s * s.c // 64)


def filter_rows(k: int, permuted: bool) -> int:
    """Rows of packed filters: a multiple of 32 if they are permuted."""
    return -(-k // 32) * 32 if permuted else k


def is_halved(post_ops: PostOps) -> bool:
    """True if weights and biases are halved: SiLU is computed as x/2 (1 + tanh(x/2)) if no residual precedes it."""
    return post_ops.activation[0] == "silu" and post_ops.residual != 1


def pack_few_channel_filters(weights: Tensor, dtype: DType, post_ops: PostOps, permuted: bool = False) -> Packed:
    """Filters [k, c, r, s] as rows [k][r][s][c], filled with zeros to whole rows of 64.

    `permuted`: rows are permuted (`permute_rows`).
    """
    k, c, r, s = (int(d) for d in weights.shape)
    row, scale = -(-r * s * c // 64) * 64, np.float32(0.5 if is_halved(post_ops) else 1)

    def make_filters() -> np.ndarray:
        out = np.zeros((filter_rows(k, permuted), row), dtype.numpy)
        out[:k, : r * s * c] = (np.asarray(weights.array(), np.float32) * scale).transpose(0, 2, 3, 1).reshape(k, -1)
        return permute_rows(out) if permuted else out

    return make_packed_array(f"{weights.constant().digest}|narrow {row} {dtype} {scale} {permuted}", filter_rows(k, permuted) * row * 2, make_filters)
