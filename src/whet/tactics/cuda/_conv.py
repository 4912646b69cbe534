"""The tensor-core convolution on the host: what it can take, how weights are packed, and the launch for one shape and configuration."""

from __future__ import annotations

import functools
import struct
from dataclasses import dataclass

import numpy as np

from whet.backends.cuda import tensormap
from whet.backends.cuda.compile import compile_cubin
from whet.backends.cuda.launch import Kernel, Launch, Module
from whet.tactics.cuda._conv_config import ConvConfig
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


def refuses(shape: ConvShape) -> str | None:
    """Why the kernel cannot take the shape, or None."""
    if shape.c % 8 or shape.k % 8:
        return f"{shape.c} input and {shape.k} output channels: both must be multiples of 8 (16 bytes)"
    if max(*shape.pad, (shape.r - 1) * shape.dilation[0], (shape.s - 1) * shape.dilation[1]) > 127:
        return "padding or filter extent above 127 pixels, which the copy engine cannot express"
    if max(shape.stride) > 8:
        return "stride above 8, which the copy engine cannot express"
    return None


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


def conv_source(config: ConvConfig, im2col: bool, activation: str, bf16: bool, out_f32: bool = False) -> str:
    """The kernel's complete text."""
    return source("conv.cu", config.constants(im2col=im2col, act=ACTIVATIONS[activation], bf16=bf16, out_f32=out_f32))


@functools.cache
def conv_kernel(config: ConvConfig, im2col: bool, activation: str, bf16: bool, out_f32: bool = False) -> Kernel:
    """The loaded kernel; compiled on first use, then kept."""
    code = compile_cubin(conv_source(config, im2col, activation, bf16, out_f32), name=f"conv_{config}.cu")
    return Module(code).kernel("conv", config.shared)


def window_map(shape: ConvShape, x: View, config: ConvConfig, dtype: str) -> bytes:
    """The tensor map through which the kernel reads its input."""
    if shape.plain:
        return tensormap.tiled(x.address, dtype, (shape.c, shape.m), (x.pitch * 2,), (config.bk, config.bm))
    return tensormap.im2col(
        x.address,
        dtype,
        (shape.c, shape.w, shape.h, shape.n),
        (x.pitch * 2, x.pitch * 2 * shape.w, x.pitch * 2 * shape.w * shape.h),
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
) -> Launch:
    """The launch of `shape` with addresses filled in; weights and bias are packed (pack_weights with config.bk, pack_bias).

    `input_map` replaces the tensor map of the input (its window positions must be those of `shape`).
    """
    dtype = "bf16" if bf16 else "f16"
    steps = shape.steps(config.bk)
    row, box = steps * config.bk, (min(64, config.bn), 64)
    a = input_map if input_map is not None else window_map(shape, x, config, dtype)
    b = tensormap.tiled(weights, dtype, (row, shape.k), (row * 2,), (config.bk, config.bn))
    if config.sk > 1 or config.direct:
        d = r = bytes(128)  # not used: plain addresses
    else:
        d = tensormap.tiled(out.address, dtype, (shape.k, shape.m), (out.pitch * 2,), box)
        r = d if residual is None else tensormap.tiled(residual.address, dtype, (shape.k, shape.m), (residual.pitch * 2,), box)
    tiles_n = -(-shape.k // config.bn)
    tiles = tiles_n * -(-shape.m // config.bm)
    numbers = struct.pack(
        "<3Q18i2f",  # as Args in conv.cu, after its four maps
        bias,
        0 if residual is None else residual.address,
        out.address,
        0 if residual is None else residual.pitch,
        out.pitch,
        shape.m,
        shape.k,
        steps,
        steps // (shape.r * shape.s),
        shape.s,
        shape.p * shape.q,
        shape.q,
        *shape.stride,
        shape.pad[0],
        shape.pad[1],
        *shape.dilation,
        tiles,
        tiles_n,
        0 if residual is None else finish.residual or 1,
        *finish.activation[1:],
    )
    args = a + b + d + r + numbers
    grid = tiles * config.sk if config.sk > 1 else min(tiles, multiprocessors * config.blocks)
    kernel = conv_kernel(config, input_map is not None or not shape.plain, finish.activation[0], bf16, out_f32)
    return Launch(kernel, (grid, 1, 1), config.threads, args + bytes(-len(args) % 64), cluster=config.sk, label=label)
