"""A depthwise convolution and the following 1x1 product in one launch of conv.cu (DW): sizes, candidates, packed filters, the launch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product

import numpy as np

from whet.backends.cuda import tensormap
from whet.backends.cuda.compile import compile_cubin
from whet.backends.cuda.driver import per_device
from whet.backends.cuda.launch import MAX_SHARED, Kernel, Launch, Module
from whet.tactics.cuda._device.source import ACTIVATIONS, emit_kernel_source
from whet.tactics.cuda.conv._conv import Activation, ConvShape, PostOps, View
from whet.tactics.cuda.conv._conv_config import ConvConfig
from whet.tactics.cuda.conv._conv_launch import ConvArguments, DepthwiseFields, LayerFields

_MOST_CHANNELS = 192  # of a tile: their accumulators and the depthwise ones share the registers
_SHARED_OF_FEW = 112 * 1024  # bytes of a block if there are few: leaves memory for the next layer's weights, and clusters of 16 fit anywhere
_NEEDED = 100  # registers of the depthwise part and of addresses


@dataclass(frozen=True)
class Pieces:
    """Input tiles of a depthwise convolution: `rows` output rows of one image, `wide` results and `pitch` input pixels from row to row."""

    rows: int
    wide: int
    pitch: int
    tall: int  # input rows
    slot: int  # bytes of a tile in shared memory, including those that the last results of a matrix read beyond it
    box: int  # bytes that a copy fills

    @staticmethod
    def of(shape: ConvShape, config: ConvConfig, k: int, multiprocessors: int) -> Pieces | str:
        """For a depthwise shape, a configuration and k output channels, or the reason why not. With few blocks, tiles have the fewest rows that keep
        them within one wave of the multiprocessors: the depthwise part takes longest."""
        step = shape.stride[0]
        pitch = (shape.q - 1) * step + shape.s
        wide = pitch if step == 1 else shape.q  # stride 1: a tap is the same matrix at an offset, row padding included
        rows = min(shape.p, (config.bm - shape.q) // wide + 1) if config.bm >= shape.q else 0
        if rows > 1 and config.wgs * config.mi == 1:
            others = shape.n * -(-k // config.bn) * config.sk
            rows = next((r for r in range(1, rows) if others * -(-shape.p // r) <= multiprocessors), rows)
        tall = (rows - 1) * step + shape.r
        if rows < 1 or pitch > 256 or tall > 256:
            return f"a row of {shape.q} pixels does not fit a tile of {config.bm}"
        read = max(tall * pitch, config.bm + (shape.r - 1) * pitch + shape.s - 1) if step == 1 else tall * pitch
        return Pieces(rows, wide, pitch, tall, -(-read * config.row // 1024) * 1024, tall * pitch * config.row)


def count_thread_rows(config: ConvConfig, pieces: Pieces) -> int:
    """Rows of the operand that a thread computes: a power of two; fewer if the tile has fewer."""
    full = config.mi * 64 * config.bk // 8 // 128
    if config.wgs * config.mi > 1:
        return full
    return next((r for r in (1, 2, 4) if r < full and r * 1024 // config.bk >= pieces.rows * pieces.wide), full)


def count_depthwise_bytes(shape: ConvShape, bk: int) -> int:
    """Bytes of the taps and biases of a K step."""
    return (shape.r * shape.s + 1) * bk * 4


def count_shared_bytes(config: ConvConfig, shape: ConvShape, pieces: Pieces) -> int:
    """Bytes of dynamic shared memory; mirrors conv.cu."""
    return config.shared_with(pieces.slot) + 2 * config.bm * config.row + config.halo * count_depthwise_bytes(shape, config.bk) + 32


def why_not_config(config: ConvConfig, shape: ConvShape, k: int, multiprocessors: int) -> str | None:
    """The reason why a configuration cannot run a depthwise `shape` followed by k output channels, or None."""
    pieces, steps = Pieces.of(shape, config, k, multiprocessors), -(-shape.c // config.bk)
    if isinstance(pieces, str):
        return pieces
    if config.sk > steps or config.hold not in (0, steps) or (config.hold and config.sk > 1) or not config.halo or config.bm % config.sk:
        return f"{config} is no tile of {steps} steps"
    accumulators = config.mi * config.bn // 2 + (config.bn // 4 + config.mi * config.bn // 4 if config.direct else 0)
    if config.bm > 256 or accumulators + _NEEDED > config.register_limit or config.bn > _MOST_CHANNELS:
        return f"{config} needs too many registers"
    need = (count_shared_bytes(config, shape, pieces) + 1024) * config.blocks
    return f"needs {need} bytes of shared memory" if need > MAX_SHARED + 1024 else None


def list_configs(shape: ConvShape, k: int, multiprocessors: int) -> list[ConvConfig]:
    """Candidates, the most promising first: for few pixels small tiles with their channels shared in a cluster, for many larger ones."""
    configs: dict[ConvConfig, float] = {}
    widths = [bn for bn in (16, 32, 64, 96, 128, 160) if bn >= min(k, 64) and (bn < 2 * k or bn == 16)]
    for (wgs, mi), bn, bk, sk in product(((1, 1), (2, 1), (1, 2), (2, 2)), widths, (64, 32, 16), (1, 2, 3, 4, 5, 6, 8, 12, 16)):
        if shape.c < bk or 64 * wgs * mi % sk or (bk < 64 and sk < 8 and shape.c % (2 * bk) == 0 and shape.c // bk > 6):
            continue
        steps = -(-shape.c // bk)
        base = ConvConfig(wgs, mi, bn, bk, min(4, -(-steps // sk)), sk, 1, int(sk == 1), 1)
        pieces = Pieces.of(shape, base, k, multiprocessors)
        if isinstance(pieces, str) or sk > steps or (sk > 1 and wgs * bn > 160):
            continue
        blocks = shape.n * -(-shape.p // pieces.rows) * -(-k // bn) * sk
        if (sk > 1 and blocks > 2 * multiprocessors) or (blocks * 5 < multiprocessors and 2 * sk <= min(steps, 16)):
            continue
        each = -(-steps // sk)
        many = blocks > 2 * multiprocessors
        for slots, resident, hold in product({1, min(2, each)} if not many else {1, 2, 3}, (1, 2, 3) if many else (1,), (0, steps) if many else (0,)):
            config = replace(base, halo=slots, blocks=resident, hold=hold, stages=2 if many else max(2, base.stages))
            more = replace(config, blocks=resident + 1)
            if not many and count_shared_bytes(config, shape, pieces) > _SHARED_OF_FEW:
                continue
            if why_not_config(config, shape, k, multiprocessors) is None and (
                not many or resident == 3 or why_not_config(more, shape, k, multiprocessors)
            ):
                configs[config] = _estimate(config, shape, k, pieces, blocks, multiprocessors)
    order = sorted(configs, key=lambda c: (configs[c], c))
    counts: dict[tuple, int] = {}
    first: list[ConvConfig] = []
    for c in order:  # two of each shape of tile before any has more
        kind = (c.bm, c.bn, c.bk, c.hold > 0)
        counts[kind] = counts.get(kind, 0) + 1
        if counts[kind] <= 2:
            first.append(c)
    return [*first, *(c for c in order if c not in first)]


def _estimate(config: ConvConfig, shape: ConvShape, k: int, pieces: Pieces, blocks: int, multiprocessors: int) -> float:
    """A rough time in us, which only orders candidates. A multiprocessor computes about 4 depthwise results of nine taps per ns, reads 40 bytes."""
    steps = -(-shape.c // config.bk)
    each = -(-steps // config.sk)
    made = count_thread_rows(config, pieces) * 1024 // config.bk * config.wgs
    compute = made * config.bk * shape.r * shape.s / 9 / (4 if config.wgs * config.blocks > 1 else 2.5)
    read = pieces.box / min(40, 4200 / min(blocks, multiprocessors))
    turns = -(-blocks // multiprocessors)
    ending = 300 if config.sk == 1 else 900 + config.bm * config.bn * 4 / 25
    return (1200 + turns * (each * max(compute, read) + config.bm * config.bn / 15) + ending) / 1000


def emit_depthwise_source(config: ConvConfig, shape: ConvShape, rows: int, inner: str, activation: str, bf16: bool) -> str:
    """The kernel's complete text; `rows` are a thread's (count_thread_rows), `inner` is the activation of the depthwise part."""
    constants = config.constants(im2col=False, act=ACTIVATIONS[activation], bf16=bf16)
    return emit_kernel_source(
        "conv.cu", {**constants, "DW": shape.stride[0], "DW_R": shape.r, "DW_S": shape.s, "DW_ACT": ACTIVATIONS[inner], "DW_ROWS": rows, "CHAINS": 1}
    )


@per_device
def _load_kernel(config: ConvConfig, shape: ConvShape, rows: int, inner: str, activation: str, bf16: bool) -> Kernel:
    code = compile_cubin(emit_depthwise_source(config, shape, rows, inner, activation, bf16), name=f"conv_depthwise_{config}.cu")
    return Module(code).kernel("conv", MAX_SHARED)


def pack_depthwise(weights: np.ndarray, bias: np.ndarray, bk: int) -> np.ndarray:
    """Filters [c, 1, r, s] and biases [c] as [K step][taps, then the bias][bk channels], float32, filled with zeros."""
    c, _, r, s = weights.shape
    steps = -(-c // bk)
    out = np.zeros((r * s + 1, steps * bk), np.float32)
    out[:-1, :c] = np.asarray(weights, np.float32).reshape(c, r * s).T
    out[-1, :c] = bias
    return out.reshape(r * s + 1, steps, bk).transpose(1, 0, 2)


def make_depthwise_launch(
    config: ConvConfig,
    shape: ConvShape,
    k: int,
    addresses: tuple[int, int, int, int, int],
    residual: int,
    inner: Activation,
    post_ops: PostOps,
    bf16: bool,
    multiprocessors: int,
    label: str,
) -> Launch:
    """The launch of a depthwise `shape` and the product to k channels. Addresses: input, depthwise filters, weights, bias, result; residual or 0."""
    x, filters, weights, bias, out = addresses
    dtype, steps = "bf16" if bf16 else "f16", -(-shape.c // config.bk)
    pieces = Pieces.of(shape, config, k, multiprocessors)
    assert isinstance(pieces, Pieces), pieces
    pixel = shape.c * 2
    box = (config.bk, pieces.pitch, pieces.tall, 1)
    a = tensormap.make_tiled_map(x, dtype, (shape.c, shape.w, shape.h, shape.n), (pixel, pixel * shape.w, pixel * shape.w * shape.h), box, plain=True)
    b = tensormap.make_tiled_map(weights, dtype, (steps * config.bk, k), (steps * config.bk * 2,), (config.bk, config.bn))
    tiles_n = -(-k // config.bn)
    tiles = tiles_n * shape.n * -(-shape.p // pieces.rows)
    product = ConvShape(shape.n, shape.p, shape.q, shape.c, k)
    arguments = ConvArguments(
        a,
        b,
        bytes(128),  # the kernel uses plain addresses
        bytes(128),
        bias=bias,
        residual=residual,
        out=out,
        layer=replace(
            LayerFields.of(product, View(out, k), View(residual, k) if residual else None, post_ops, (steps, steps), (tiles, tiles_n)),
            stride_h=shape.stride[0],
            stride_w=shape.stride[1],
            pad_h=shape.pad[0],
            pad_w=shape.pad[1],
        ),
        wide=pieces.wide,
        rows=pieces.rows,
        height=shape.p,
        slot_bytes=pieces.slot,
        box_bytes=pieces.box,
        depthwise=DepthwiseFields(filters, inner[1:], slot_wide=pieces.pitch),
    )
    grid = tiles * config.sk if config.sk > 1 else min(tiles, multiprocessors * config.blocks)
    if config.hold:  # a block's tiles have the same output channels
        grid = max(1, grid // tiles_n) * tiles_n
    kernel = _load_kernel(
        config, replace(shape, n=1, h=0, w=0, c=0, k=0, pad=(0, 0, 0, 0)), count_thread_rows(config, pieces), inner[0], post_ops.activation[0], bf16
    )
    shared = count_shared_bytes(config, shape, pieces)
    return Launch(kernel, (grid, 1, 1), config.threads, arguments.pack(), cluster=config.sk, label=label, shared=shared)


def emit_launch_source(config: ConvConfig, shape: ConvShape, k: int, multiprocessors: int, inner: str, activation: str, bf16: bool) -> str:
    """As emit_depthwise_source, with the rows that the launch will have."""
    pieces = Pieces.of(shape, config, k, multiprocessors)
    assert isinstance(pieces, Pieces), pieces
    return emit_depthwise_source(config, shape, count_thread_rows(config, pieces), inner, activation, bf16)
