"""The tensor-core convolution on the host: what it can take, how weights are packed, and the launch for one shape and configuration."""

from __future__ import annotations

import struct
from dataclasses import dataclass, replace
from itertools import product

import numpy as np

from whet.backends.cuda import tensormap
from whet.backends.cuda.compile import compile_cubin
from whet.backends.cuda.driver import per_device
from whet.backends.cuda.launch import MAX_SHARED, Kernel, Launch, Module
from whet.errors import BackendError
from whet.tactics.cuda._conv_config import ConvConfig, configs_for, estimate_us, step_channels, with_once
from whet.tactics.cuda._source import ACTIVATIONS, source

INFINITY = float("inf")
Activation = tuple[str, float, float]
"""Kind (a key of ACTIVATIONS) and its two parameters: bounds of a clip, slope, ..."""
RELU: Activation = ("clip", 0.0, INFINITY)
NONE: Activation = ("clip", -INFINITY, INFINITY)


@dataclass(frozen=True)
class ConvShape:
    """A convolution's sizes: n images of h x w x c, k filters of r x s; pad is (top, left, bottom, right)."""

    n: int
    h: int
    w: int
    c: int
    k: int
    r: int = 1
    s: int = 1
    stride: tuple[int, int] = (1, 1)
    pad: tuple[int, int, int, int] = (0, 0, 0, 0)
    dilation: tuple[int, int] = (1, 1)

    @property
    def p(self) -> int:
        """Output height."""
        return (self.h + self.pad[0] + self.pad[2] - (self.r - 1) * self.dilation[0] - 1) // self.stride[0] + 1

    @property
    def q(self) -> int:
        """Output width."""
        return (self.w + self.pad[1] + self.pad[3] - (self.s - 1) * self.dilation[1] - 1) // self.stride[1] + 1

    @property
    def m(self) -> int:
        """Output pixels of all images: the rows of the matrix product."""
        return self.n * self.p * self.q

    @property
    def flops(self) -> int:
        """Multiplications and additions."""
        return 2 * self.m * self.k * self.r * self.s * self.c

    @property
    def plain(self) -> bool:
        """Whether the input, as it lies, is already the matrix: 1x1, stride 1, no padding."""
        return (self.r, self.s, *self.stride, *self.pad) == (1, 1, 1, 1, 0, 0, 0, 0)

    def steps(self, bk: int) -> int:
        """K steps of `bk` channels; each filter tap is filled up to whole steps."""
        return self.r * self.s * -(-self.c // bk)


@dataclass(frozen=True)
class View:
    """An NHWC tensor in device memory: the address of its first channel and the elements from one pixel to the next."""

    address: int
    pitch: int


@dataclass(frozen=True)
class Finish:
    """What happens to a sum before it is stored: a residual (0 none, 1 before, 2 after the activation), then the activation."""

    activation: Activation = NONE
    residual: int = 0


@dataclass(frozen=True)
class Eight:
    """Types of a product of 8-bit numbers: input and weights, result, residual ("" none), and whether the bias depends on the pixel."""

    source: str  # "i8" or "u8" by i8, or "f8e4m3" by itself
    result: str
    residual: str = ""
    border: bool = False
    fold: bool = False  # 8 bits out, the activation is a clip: results are computed in steps (_quantized.folded, folded_float8)

    def constants(self) -> dict[str, int]:
        """Macros of the kernel."""
        to = TYPES[self.result]
        return {"IN8": TYPES[self.source], "TO": to, "ADD": TYPES[self.residual or self.result], "BORDER": int(self.border), "FOLD": int(self.fold)}


@dataclass(frozen=True)
class Steps:
    """Scales of a product of 8-bit numbers; `factor` and `classes` are addresses (_quantized.py packs what they point to)."""

    factor: int
    per_step: float = 1.0
    zero: float = 0.0
    add_step: float = 1.0
    add_shift: float = 0.0
    classes: int = 0
    class_pitch: int = 0


@dataclass(frozen=True)
class Groups:
    """A convolution of several groups: output and input channels of each, input channels of all.

    Its ConvShape has as input channels the window that one tile reads; conv.cu begins it at the tile's first group, at a multiple of eight.
    """

    k: int
    c: int
    channels: int

    def first(self, n0: int) -> int:
        """The first input channel of the tile whose output channels begin at n0."""
        return n0 // self.k * self.c & ~7

    def window(self, filters: int, bn: int) -> int:
        """Input channels that tiles of `bn` of `filters` output channels read at most."""
        return max((min(n0 + bn, filters) - 1) // self.k * self.c + self.c - self.first(n0) for n0 in range(0, filters, bn))


@dataclass(frozen=True)
class Between:
    """How the first of two sums becomes integers before the second adds it: addresses of biases and factors, steps and lowest integer."""

    bias: int
    factor: int
    span: float
    base: float


@dataclass(frozen=True)
class Second:
    """A second convolution whose result is added before the activation: 1x1, no padding, to the same output."""

    shape: ConvShape
    x: View
    between: Between | None = None

    @staticmethod
    def kind(shape: ConvShape) -> int:
        """PAIR of conv.cu for such a shape."""
        return 1 if shape.plain else 2


@dataclass(frozen=True)
class Fork:
    """A second result: output channels from `at` on go to `out`."""

    at: int
    out: View

    @staticmethod
    def panel(at: int, config: ConvConfig) -> int:
        """FORK of conv.cu: channels of a panel that belongs to one result, or 0 where none divides a tile."""
        return next((w for w in (64, 32, 16) if at % w == 0 and config.bn % w == 0), 0)


TYPES = {"f32": 0, "f16": 1, "bf16": 2, "i8": 3, "u8": 4, "f8e4m3": 5}  # numbers as in vector.cuh


def refuses(shape: ConvShape, odd: bool = False, size: int = 2) -> str | None:
    """Why the kernel cannot take the shape, or None. `odd`: output channels need not come in eights (then no residual and no split)."""
    if shape.c * size % 16 or (shape.k % 8 and not odd):
        return f"{shape.c} input and {shape.k} output channels of {size} bytes: inputs come in 16 bytes, outputs in eights"
    if max(*shape.pad, (shape.r - 1) * shape.dilation[0], (shape.s - 1) * shape.dilation[1]) > 127:
        return "padding or filter extent above 127 pixels, which the copy engine cannot express"
    if max(shape.stride) > 8:
        return "stride above 8, which the copy engine cannot express"
    return None


def pack_weights8(weights: np.ndarray, bk: int) -> np.ndarray:
    """As pack_weights for elements of one byte; rows dealt out (`dealt_rows`)."""
    k = weights.shape[0]
    plain = pack_weights(weights, bk, weights.dtype)
    out = np.zeros((-(-k // 32) * 32, *plain.shape[1:]), weights.dtype)
    out[:k] = plain
    return dealt_rows(out)


def dealt_rows(weights: np.ndarray) -> np.ndarray:
    """Rows (a multiple of 32) in another order, so that lane q of a quad, which sums columns 8j + 2q + e, has channels 8q + 2j + e of every 32."""
    parts = weights.reshape(-1, 4, 4, 2, *weights.shape[1:])
    return np.ascontiguousarray(parts.swapaxes(1, 2)).reshape(weights.shape)


def pack_weights(weights: np.ndarray, bk: int, dtype: np.dtype) -> np.ndarray:
    """Filters [k, c, r, s] as rows [k][r][s][c], channels filled with zeros to a multiple of `bk`."""
    k, c, r, s = weights.shape
    out = np.zeros((k, r, s, -(-c // bk) * bk), dtype)
    out[..., :c] = weights.transpose(0, 2, 3, 1)
    return out


def bias_count(k: int) -> int:
    """Floats of a packed bias: whole tiles of any width."""
    return -(-k // 256) * 256 + 256


def pack_bias(bias: np.ndarray | None, k: int) -> np.ndarray:
    """The bias as float32, filled with zeros."""
    out = np.zeros(bias_count(k), np.float32)
    if bias is not None:
        out[:k] = bias
    return out


def conv_source(
    config: ConvConfig,
    im2col: bool,
    activation: str,
    bf16: bool,
    out_f32: bool = False,
    odd: bool = False,
    eight: Eight | None = None,
    grouped: bool = False,
    pair: int = 0,
    between: bool = False,
    fork: int = 0,
) -> str:
    """The kernel's complete text."""
    made = config.constants(im2col=im2col, act=ACTIVATIONS[activation], bf16=bf16, out_f32=out_f32, odd=odd)
    more = {"GROUPED": int(grouped), "PAIR": pair, "BETWEEN": int(between), "FORK": fork}
    return source("conv.cu", {**made, **({} if eight is None else eight.constants()), **{k: v for k, v in more.items() if v}})


@per_device
def conv_kernel(
    config: ConvConfig,
    im2col: bool,
    activation: str,
    bf16: bool,
    out_f32: bool = False,
    odd: bool = False,
    eight: Eight | None = None,
    grouped: bool = False,
    pair: int = 0,
    between: bool = False,
    fork: int = 0,
) -> Kernel:
    """The loaded kernel; compiled on first use, then kept."""
    code = compile_cubin(conv_source(config, im2col, activation, bf16, out_f32, odd, eight, grouped, pair, between, fork), name=f"conv_{config}.cu")
    return Module(code).kernel("conv", MAX_SHARED if config.halo else config.shared)


@dataclass(frozen=True)
class Halo:
    """A tile of some output rows of one image with all input pixels that its filter taps need; see HALO in conv.cu."""

    wide: int  # pixels from row to row
    rows: int  # output rows of a tile
    slot: int  # bytes of an input slot: what a copy fills, and what the last tap's shifted rows may read beyond it
    box: int  # bytes that a copy fills

    @staticmethod
    def of(shape: ConvShape, config: ConvConfig) -> Halo | str:
        """For a shape and a configuration, or why not."""
        if shape.stride != (1, 1) or shape.dilation != (1, 1) or shape.r * shape.s == 1:
            return "input tiles with all taps are for filters of several taps, stride 1, no dilation"
        wide = shape.q + shape.s - 1
        rows = min(shape.p, (config.bm - shape.q) // wide + 1) if config.bm >= shape.q else 0
        if rows < 1 or wide > 256 or rows + shape.r - 1 > 256:
            return f"a row of {shape.q} pixels does not fit a tile of {config.bm}"
        read = max((rows + shape.r - 1) * wide, config.bm + (shape.r - 1) * wide + shape.s - 1)
        return Halo(wide, rows, -(-read * config.row // 1024) * 1024, (rows + shape.r - 1) * wide * config.row)


def fits(config: ConvConfig, shape: ConvShape) -> str | None:
    """Why a configuration cannot run a shape, or None."""
    if config.hold not in (0, shape.steps(config.bk)) or (config.hold and config.sk > 1):
        return f"holds the weights of {config.hold} steps of {shape.steps(config.bk)}"
    if config.once and not config.halo and with_once(config, shape.steps(config.bk)) != config:
        return f"has slots of their own for {config.once} steps of {shape.steps(config.bk)}"
    if not config.halo:
        return None
    if config.once and with_once(config, steps := shape.steps(config.bk), _touched(config, steps, shape.r * shape.s)) != config:
        return f"has slots of their own for {config.once} steps of {steps}"
    halo = Halo.of(shape, config)
    if isinstance(halo, str):
        return halo
    need = config.shared_with(halo.slot)
    return f"needs {need} bytes of shared memory" if (need + 1024) * config.blocks > MAX_SHARED + 1024 else None


def conv_configs(shape: ConvShape, multiprocessors: int = 132, size: int = 2) -> list[ConvConfig]:
    """All candidates for a shape (elements of `size` bytes), the most promising first: those with input tiles of all taps, then the rest."""
    found = configs_for(shape.m, shape.k, shape.c, shape.r * shape.s, multiprocessors, size)
    with_taps = [(_halo_us(c, shape, multiprocessors), c) for c in _halo_configs(shape, multiprocessors, size)]
    both = sorted([*with_taps, *((estimate_us(c, shape.m, shape.k, shape.steps(c.bk), multiprocessors), c) for c in found)])
    return [c for _, c in both]


def _halo_configs(shape: ConvShape, multiprocessors: int, size: int) -> list[ConvConfig]:
    """Candidates with input tiles: small ones that share K in a cluster, larger ones for many pixels."""
    if shape.r * shape.s == 1 or shape.stride != (1, 1) or shape.dilation != (1, 1):
        return []
    bk = step_channels(shape.c, size)
    found: set[ConvConfig] = set()
    taps, steps = shape.r * shape.s, shape.steps(bk)
    for wgs, mi in ((1, 1), (2, 1), (3, 1), (1, 2), (2, 2)):
        for bn in (16, 32, 64, *([80] if shape.k % 80 == 0 else []), 128):
            if bn > 32 // size and bn >= 2 * shape.k:
                continue
            for sk in (1, 2, 4, 8, 16):
                base = ConvConfig(wgs, mi, bn, bk, 2, sk, 1, int(sk == 1), 1, size)
                halo = Halo.of(shape, base)
                if isinstance(halo, str) or sk > steps or (sk > 1 and (wgs * bn > 128 or mi > 1)):
                    continue
                blocks = shape.n * -(-shape.p // halo.rows) * -(-shape.k // bn) * sk
                if (sk > 1 and blocks > 2 * multiprocessors) or (blocks * 6 < multiprocessors and 2 * sk <= min(steps, 16)) or base.bm // sk < 4:
                    continue
                each = -(-steps // sk)
                slots = min(2, -(-each // taps) + (steps % sk != 0 or each % taps != 0))
                many = blocks > 2 * multiprocessors
                limit = MAX_SHARED if many else 112 * 1024
                for stages, resident, places in product((3, 4, 6, 9, 12), (1, 2, 3) if many else (1,), {slots, 2} if many else {slots}):
                    config = replace(base, stages=stages, halo=places, blocks=resident)
                    if stages <= max(each, 3):
                        keeps = [replace(config, hold=steps, stages=2)] if many else []
                        found.update(c for c in (config, *keeps) if c.valid() and c.shared_with(halo.slot) <= limit and fits(c, shape) is None)
    best: dict[ConvConfig, ConvConfig] = {}  # of equal tiles keep the deepest ring
    for c in sorted(found):
        best[replace(c, stages=1)] = c
    return sorted(with_once(c, steps, _touched(c, steps, taps)) if _alone(c, shape, multiprocessors) else c for c in best.values())


def _alone(config: ConvConfig, shape: ConvShape, multiprocessors: int) -> bool:
    """Whether a block makes one tile."""
    halo = Halo.of(shape, config)
    return config.sk > 1 or (isinstance(halo, Halo) and shape.n * -(-shape.p // halo.rows) * -(-shape.k // config.bn) <= multiprocessors)


def _touched(config: ConvConfig, steps: int, taps: int) -> int:
    """Input tiles of all taps that a block reads at most."""
    each = steps // config.sk
    return max(((rank + 1) * each - 1) // taps - rank * each // taps + 1 for rank in range(config.sk)) if each else 0


def _halo_us(config: ConvConfig, shape: ConvShape, multiprocessors: int) -> float:
    """As estimate_us, for input tiles of all taps."""
    halo = Halo.of(shape, config)
    assert not isinstance(halo, str)
    steps, taps, row = shape.steps(config.bk), shape.r * shape.s, config.row
    tiles = shape.n * -(-shape.p // halo.rows) * -(-shape.k // config.bn)
    turns = -(-tiles * config.sk // multiprocessors)
    each = -(-steps // config.sk)
    taken = -(-each // taps) * halo.box + (0 if config.hold else 1) * max(0, each - (config.stages if turns == 1 else 0)) * config.bn * row
    busy = min(tiles * config.sk, multiprocessors)
    mma = each * 2 * config.bm * config.bn * row / 12000 * max(1.0, 128 / config.bn / 1.5)
    store = config.bm * config.bn * config.size / 30
    ending = 300 if config.sk == 1 else 900 + config.bm * config.bn * 4 / 25
    alone = 150 if config.halo > 1 or turns == 1 else 500  # with one slot a tile waits for its input
    return (900 + turns * (alone + max(taken / 83, taken * busy / 8000, mma) + store) + ending) / 1000


def window_map(shape: ConvShape, x: View, config: ConvConfig, dtype: str) -> bytes:
    """The tensor map through which the kernel reads its input."""
    if shape.plain:
        return tensormap.tiled(x.address, dtype, (shape.c, shape.m), (x.pitch * config.size,), (config.bk, config.bm))
    pixel = x.pitch * config.size
    return tensormap.im2col(
        x.address,
        dtype,
        (shape.c, shape.w, shape.h, shape.n),
        (pixel, pixel * shape.w, pixel * shape.w * shape.h),
        lower=(-shape.pad[1], -shape.pad[0]),
        upper=(shape.pad[3] - (shape.s - 1) * shape.dilation[1], shape.pad[2] - (shape.r - 1) * shape.dilation[0]),
        step=(shape.stride[1], shape.stride[0]),
        channels=config.bk,
        pixels=config.bm,
    )


def conv_launch(
    config: ConvConfig,
    shape: ConvShape,
    x: View,
    weights: int,
    bias: int,
    out: View,
    *,
    residual: View | None = None,
    finish: Finish = Finish(),
    bf16: bool = False,
    out_f32: bool = False,
    input_map: bytes | None = None,
    multiprocessors: int = 132,
    label: str = "",
    eight: Eight | None = None,
    numbers8: Steps | None = None,
    groups: Groups | None = None,
    second: Second | None = None,
    fork: Fork | None = None,
) -> Launch:
    """The launch of `shape` with addresses filled in; weights and bias are packed (pack_weights with config.bk, pack_bias).

    `input_map` replaces the tensor map of the input (its window positions must be those of `shape`). `eight` and `numbers8` are for
    8-bit operands, whose weights pack_weights8 packs. `groups` is for several groups, whose weights own_group_conv packs.
    With `second` the weights of both convolutions lie side by side in each row, and the bias is the sum of both.
    With `fork` (1x1, 16-bit floats) the last output channels are a result of their own.
    """
    dtype = "u8" if eight else "bf16" if bf16 else "f16"
    first_steps = shape.steps(config.bk)
    steps = first_steps + (0 if second is None else second.shape.steps(config.bk))
    panel = 0 if fork is None else Fork.panel(fork.at, config)
    row, box, own = steps * config.bk, (panel or _panel(config), 64), shape.k if fork is None else fork.at
    halo = Halo.of(shape, config) if config.halo else Halo(1, 1, 0, 0)
    whole = shape if groups is None else replace(shape, c=groups.channels)
    if isinstance(halo, str):
        raise BackendError(f"{config} cannot run {shape}: {halo}. This is a mistake in whet: please report it.")
    if input_map is not None:
        a = input_map
    elif config.halo:
        pixel, size = x.pitch * config.size, (whole.c, shape.w, shape.h, shape.n)
        strides = (pixel, pixel * shape.w, pixel * shape.w * shape.h)
        a = tensormap.tiled(x.address, dtype, size, strides, (config.bk, halo.wide, halo.rows + shape.r - 1, 1))
    else:
        a = window_map(whole, x, config, dtype)
    filters = -(-shape.k // 32) * 32 if eight else shape.k
    b = tensormap.tiled(weights, dtype, (row, filters), (row * config.size,), (config.bk, config.bn))
    if config.sk > 1 or config.direct:
        d = r = bytes(128)  # not used: plain addresses
    else:
        d = tensormap.tiled(out.address, dtype, (own, shape.m), (out.pitch * config.size,), box)
        r = d if residual is None else tensormap.tiled(residual.address, dtype, (shape.k, shape.m), (residual.pitch * config.size,), box)
    tiles_n = -(-shape.k // config.bn)
    tiles = tiles_n * (shape.n * -(-shape.p // halo.rows) if config.halo else -(-shape.m // config.bm))
    numbers = layer_numbers(shape, bias, out, residual, finish, (steps, first_steps), (tiles, tiles_n))
    numbers += struct.pack("<5i", halo.wide, halo.rows, shape.p, halo.slot, halo.box)
    if groups is not None:
        numbers += struct.pack("<2i", groups.k, groups.c)
    if eight:
        assert numbers8 is not None
        n8 = numbers8
        numbers += struct.pack("<4x2Q4fi", n8.factor, n8.classes, n8.per_step, n8.zero, n8.add_step, n8.add_shift, n8.class_pitch)
    args = a + b + d + r + numbers
    if second is not None:
        args += bytes(-len(args) % 64) + window_map(second.shape, second.x, config, dtype)
        args += struct.pack("<3i", first_steps, *second.shape.stride)
        if second.between is not None:
            made = second.between
            args += struct.pack("<4x2Q2f", made.bias, made.factor, made.span, made.base)
    if fork is not None:
        d = tensormap.tiled(fork.out.address, dtype, (shape.k - fork.at, shape.m), (fork.out.pitch * config.size,), box)
        args += bytes(-len(args) % 64) + d + struct.pack("<Q2i", fork.out.address, fork.at, fork.out.pitch)
    if config.once and config.once * config.sk != steps:
        raise BackendError(f"{config} has not {steps} steps. This is a mistake in whet: please report it.")
    grid = tiles * config.sk if config.sk > 1 or config.once else min(tiles, multiprocessors * config.blocks)
    if config.hold:  # a block's tiles have the same output channels
        grid = max(1, grid // tiles_n) * tiles_n
    im2col = not config.halo and (input_map is not None or not shape.plain)
    pair = 0 if second is None else Second.kind(second.shape)
    between = second is not None and second.between is not None
    kernel = conv_kernel(config, im2col, finish.activation[0], bf16, out_f32, shape.k % 8 != 0, eight, groups is not None, pair, between, panel)
    shared = config.shared_with(halo.slot) if config.halo else -1
    return Launch(kernel, (grid, 1, 1), config.threads, args + bytes(-len(args) % 64), cluster=config.sk, label=label, shared=shared)


def layer_numbers(
    shape: ConvShape, bias: int, out: View, residual: View | None, finish: Finish, steps: tuple[int, int], tiles: tuple[int, int]
) -> bytes:
    """What Args has behind its maps, in conv.cu and in tf32.cu, up to `act`.

    `steps`: K steps in all, and those of this shape (a second input has the others). `tiles`: in all, and along the output channels.
    """
    return struct.pack(
        "<3Q18i2f",
        bias,
        0 if residual is None else residual.address,
        out.address,
        0 if residual is None else residual.pitch,
        out.pitch,
        shape.m,
        shape.k,
        steps[0],
        steps[1] // (shape.r * shape.s),
        shape.s,
        shape.p * shape.q,
        shape.q,
        *shape.stride,
        shape.pad[0],
        shape.pad[1],
        *shape.dilation,
        *tiles,
        0 if residual is None else finish.residual or 1,
        *finish.activation[1:],
    )


def _panel(config: ConvConfig) -> int:
    """Columns of a panel of the output tile; as PW in conv.cu."""
    widest = 128 // config.size
    return next(w for w in (widest, widest // 2, widest // 4) if config.bn % w == 0)
