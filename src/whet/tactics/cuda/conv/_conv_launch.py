"""Launches of conv.cu: the text of an instance, its tensor maps, and the arguments for one shape, configuration and addresses."""

from __future__ import annotations

import struct
from dataclasses import replace
from typing import Any

from whet.backends.cuda import tensormap
from whet.backends.cuda.compile import compile_cubin
from whet.backends.cuda.driver import per_device
from whet.backends.cuda.launch import MAX_SHARED, Kernel, Launch, Module
from whet.errors import BackendError
from whet.tactics.cuda._device.source import ACTIVATIONS, source
from whet.tactics.cuda.conv._conv import AS_SUMMED, ConvShape, Eight, Finish, Fork, Groups, Second, Steps, View
from whet.tactics.cuda.conv._conv_config import ConvConfig
from whet.tactics.cuda.conv._conv_tiles import Halo


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
def conv_kernel(config: ConvConfig, *how: Any) -> Kernel:
    """The loaded kernel of `conv_source(config, *how)`; compiled on first use, then kept."""
    code = compile_cubin(conv_source(config, *how), name=f"conv_{config}.cu")
    return Module(code).kernel("conv", MAX_SHARED if config.halo else config.shared)


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
    finish: Finish = AS_SUMMED,
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
    8-bit operands, whose weights pack_weights8 packs. `groups` is for several groups, whose weights group_conv packs.
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
    """What Args has behind its maps, in conv.cu and in conv_tf32.cu, up to `act`.

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
