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
RELU = ("clip", 0.0, INFINITY)
NONE = ("clip", -INFINITY, INFINITY)


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


def refuses(shape: ConvShape, in_pitch: int, out_pitch: int) -> str | None:
    """Why the kernel cannot take the shape, or None."""
    if in_pitch % 8 or out_pitch % 8 or shape.k % 8:
        return f"pitches {in_pitch} and {out_pitch} and {shape.k} output channels must be multiples of 8 (16 bytes)"
    corners = (shape.pad[0], shape.pad[1], (shape.r - 1) * shape.dilation[0], (shape.s - 1) * shape.dilation[1])
    if max(corners) > 127:
        return "padding or filter extent above 127 pixels"
    if max(shape.stride) > 8:
        return "stride above 8"
    return None


def pack_weights(weights: np.ndarray, bk: int, dtype: np.dtype) -> np.ndarray:
    """Filters [k, c, r, s] as rows [k][r][s][c], channels filled with zeros to a multiple of `bk`."""
    k, c, r, s = weights.shape
    out = np.zeros((k, r, s, -(-c // bk) * bk), dtype)
    out[..., :c] = weights.transpose(0, 2, 3, 1)
    return out


def pack_bias(bias: np.ndarray | None, k: int) -> np.ndarray:
    """The bias as float32, filled with zeros to whole tiles of any width."""
    out = np.zeros(-(-k // 256) * 256 + 256, np.float32)
    if bias is not None:
        out[:k] = bias
    return out


def conv_source(config: ConvConfig, im2col: bool, activation: str, bf16: bool) -> str:
    """The kernel's complete text."""
    return source("conv.cu", config.constants(im2col=im2col, act=ACTIVATIONS[activation], bf16=bf16))


@functools.lru_cache(maxsize=None)
def conv_kernel(config: ConvConfig, im2col: bool, activation: str, bf16: bool, arch: str = "sm_90a") -> Kernel:
    """The loaded kernel; compiled on first use, then kept."""
    code = compile_cubin(conv_source(config, im2col, activation, bf16), name=f"conv_{config}.cu", arch=arch)
    return Module(code).kernel("conv", config.shared)


def conv_launch(
    config: ConvConfig,
    shape: ConvShape,
    x: View,
    weights: int,
    bias: int,
    out: View,
    *,
    residual: View | None = None,
    activation: tuple[str, float, float] = NONE,
    bf16: bool = False,
    multiprocessors: int = 132,
    label: str = "",
) -> Launch:
    """The launch of `shape` with addresses filled in; weights and bias are packed (pack_weights with config.bk, pack_bias)."""
    dtype = "bf16" if bf16 else "f16"
    steps = shape.steps(config.bk)
    columns = min(64, config.bn)
    if shape.plain:
        a = tensormap.tiled(x.address, dtype, (shape.c, shape.m), (x.pitch * 2,), (config.bk, config.bm))
    else:
        a = tensormap.im2col(
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
    return _launch(config, shape, a, weights, bias, out, residual, activation, bf16, multiprocessors, label, steps, columns, not shape.plain)


def _launch(
    config: ConvConfig,
    shape: ConvShape,
    a: bytes,
    weights: int,
    bias: int,
    out: View,
    residual: View | None,
    activation: tuple[str, float, float],
    bf16: bool,
    multiprocessors: int,
    label: str,
    steps: int,
    columns: int,
    im2col: bool,
) -> Launch:
    dtype = "bf16" if bf16 else "f16"
    row = steps * config.bk
    b = tensormap.tiled(weights, dtype, (row, shape.k), (row * 2,), (config.bk, config.bn))
    d = tensormap.tiled(out.address, dtype, (shape.k, shape.m), (out.pitch * 2,), (columns, 64))
    r = d if residual is None else tensormap.tiled(residual.address, dtype, (shape.k, shape.m), (residual.pitch * 2,), (columns, 64))
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
        int(residual is not None),
        activation[1],
        activation[2],
    )
    args = a + b + d + r + numbers
    args += bytes(-len(args) % 64)
    grid = tiles * config.sk if config.sk > 1 else min(tiles, multiprocessors * config.blocks)
    kernel = conv_kernel(config, im2col, activation[0], bf16)
    return Launch(kernel, (grid, 1, 1), config.threads, args, cluster=config.sk, label=label)
