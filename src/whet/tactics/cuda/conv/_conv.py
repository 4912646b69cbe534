"""Host side of the tensor-core convolution: sizes, types and epilogues, limits of the kernel, and the packing of weights."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from whet.tactics.cuda._device.arguments import ConstFloatPointer, ConstU16Pointer, Fields, Float32, Int32
from whet.tactics.cuda.conv._conv_config import ConvConfig

INFINITY = float("inf")
Activation = tuple[str, float, float]
"""Kind (a key of ACTIVATIONS) and its two parameters: bounds of a clip, slope, ..."""
RELU: Activation = ("clip", 0.0, INFINITY)
NONE: Activation = ("clip", -INFINITY, INFINITY)


@dataclass(frozen=True)
class ConvShape:
    """A convolution's sizes: n samples of h x w x c, k filters of r x s; pad is (top, left, bottom, right)."""

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
        """Output pixels of the batch: the rows of the matrix product."""
        return self.n * self.p * self.q

    @property
    def flops(self) -> int:
        """Multiplications and additions."""
        return 2 * self.m * self.k * self.r * self.s * self.c

    @property
    def plain(self) -> bool:
        """True if the input is already the matrix: 1x1, stride 1, no padding."""
        return (self.r, self.s, *self.stride, *self.pad) == (1, 1, 1, 1, 0, 0, 0, 0)

    @property
    def window(self) -> dict[str, int]:
        """Filter width, strides, padding and dilations, by their names in the kernels' arguments."""
        (stride_h, stride_w), (pad_h, pad_w), (dil_h, dil_w) = self.stride, self.pad[:2], self.dilation
        return {"taps_w": self.s, "stride_h": stride_h, "stride_w": stride_w, "pad_h": pad_h, "pad_w": pad_w, "dil_h": dil_h, "dil_w": dil_w}

    def steps(self, bk: int) -> int:
        """K steps of `bk` channels; each filter tap is padded to whole steps."""
        return self.r * self.s * -(-self.c // bk)


@dataclass(frozen=True)
class View:
    """An NHWC tensor in device memory: the address of its first channel and the elements from one pixel to the next."""

    address: int
    pitch: int


@dataclass(frozen=True)
class PostOps:
    """The operations on an accumulator before it is stored: a residual (0 none, 1 before, 2 after the activation), then the activation."""

    activation: Activation = NONE
    residual: int = 0


NO_POST_OPS = PostOps()


@dataclass(frozen=True)
class EightBitTypes:
    """Types of a product of 8-bit operands: input and weights, result, residual ("" none); and if the bias depends on the pixel."""

    source: str  # "i8" or "u8" by i8, or "f8e4m3" by itself
    result: str
    residual: str = ""
    border: bool = False
    fold: bool = False  # 8 bits out, the activation is a clip: results are computed in steps (_quantized.folded, folded_float8)

    @property
    def result_bytes(self) -> int:
        """Bytes of a result."""
        return {"f32": 4, "f16": 2, "bf16": 2}.get(self.result, 1)

    def constants(self) -> dict[str, int]:
        """Macros of the kernel."""
        to = TYPES[self.result]
        return {"IN8": TYPES[self.source], "TO": to, "ADD": TYPES[self.residual or self.result], "BORDER": int(self.border), "FOLD": int(self.fold)}


@dataclass(frozen=True)
class Scales(Fields):
    """Scales of a product of 8-bit operands; _quantized.py packs the arrays."""

    factor: ConstFloatPointer  # [tiles_n * BN]: real value of a step of the accumulator
    classes: ConstU16Pointer = 0  # BORDER: index of the bias for each pixel of an image
    per_step: Float32 = 1.0  # 8-bit results: steps of a real one, and the zero point
    zero: Float32 = 0.0
    add_step: Float32 = 1.0  # 8-bit residual: real = integer * step + shift
    add_shift: Float32 = 0.0
    class_pitch: Int32 = 0  # floats from bias to bias


@dataclass(frozen=True)
class Groups:
    """A convolution of several groups: output and input channels of each, input channels of all.

    The input channels of its ConvShape are the window that one tile reads; conv.cu starts it at the tile's first group, at a multiple of eight.
    """

    k: int
    c: int
    channels: int

    def first(self, n0: int) -> int:
        """The first input channel of the tile with output channels from n0 on."""
        return n0 // self.k * self.c & ~7

    def window(self, filters: int, bn: int) -> int:
        """Input channels that tiles of `bn` of `filters` output channels read at most."""
        return max((min(n0 + bn, filters) - 1) // self.k * self.c + self.c - self.first(n0) for n0 in range(0, filters, bn))


@dataclass(frozen=True)
class Between(Fields):
    """How the first of two accumulators becomes integers before the second is added."""

    between_bias: ConstFloatPointer  # [tiles_n * BN]: of the first accumulators
    between_factor: ConstFloatPointer
    between_span: Float32  # steps and lowest integer, as per_step and zero with FOLD
    between_base: Float32


@dataclass(frozen=True)
class SecondInput:
    """A second convolution whose result is added before the activation: 1x1, no padding, of the same output size."""

    shape: ConvShape
    x: View
    between: Between | None = None

    @staticmethod
    def kind(shape: ConvShape) -> int:
        """SECOND_INPUT of conv.cu for this shape."""
        return 1 if shape.plain else 2


@dataclass(frozen=True)
class SecondOutput:
    """A second result: output channels from `at` on go to `out`."""

    at: int
    out: View

    @staticmethod
    def panel(at: int, config: ConvConfig) -> int:
        """DUAL_OUTPUT of conv.cu: channels of a panel that belongs to one result, or 0 if none divides a tile."""
        return next((w for w in (64, 32, 16) if at % w == 0 and config.bn % w == 0), 0)


@dataclass(frozen=True)
class RowNorm:
    """A normalization of each row of a plain input over its channels; the weights contain its scales, the bias the products of its shifts."""

    kind: int  # 1: layer norm, 2: root mean square
    column_sums: int  # address: sums of the (rounded) weights of each output channel
    epsilon: float


TYPES = {"f32": 0, "f16": 1, "bf16": 2, "i8": 3, "u8": 4, "f8e4m3": 5}  # codes as in vector.cuh


def refuses(shape: ConvShape, odd: bool = False, size: int = 2) -> str | None:
    """The reason why the kernel cannot take the shape, or None. `odd`: any number of output channels (then no residual and no split)."""
    if shape.c * size % 16 or (shape.k % 8 and not odd):
        return f"{shape.c} input and {shape.k} output channels of {size} bytes; takes inputs of whole 16 bytes and a multiple of 8 outputs"
    if max(*shape.pad, (shape.r - 1) * shape.dilation[0], (shape.s - 1) * shape.dilation[1]) > 127:
        return "padding or filter extent above 127 pixels, which the copy engine cannot express"
    if max(shape.stride) > 8:
        return "stride above 8, which the copy engine cannot express"
    return None


def pack_weights8(weights: np.ndarray, bk: int) -> np.ndarray:
    """As pack_weights for elements of one byte; rows permuted (`permute_rows`)."""
    k = weights.shape[0]
    plain = pack_weights(weights, bk, weights.dtype)
    out = np.zeros((-(-k // 32) * 32, *plain.shape[1:]), weights.dtype)
    out[:k] = plain
    return permute_rows(out)


def permute_rows(weights: np.ndarray) -> np.ndarray:
    """Rows (a multiple of 32) in another order, so that lane q of a quad, which sums columns 8j + 2q + e, has channels 8q + 2j + e of every 32."""
    parts = weights.reshape(-1, 4, 4, 2, *weights.shape[1:])
    return np.ascontiguousarray(parts.swapaxes(1, 2)).reshape(weights.shape)


def pack_weights(weights: np.ndarray, bk: int, dtype: np.dtype) -> np.ndarray:
    """Filters [k, c, r, s] as rows [k][r][s][c], channels filled with zeros to a multiple of `bk`."""
    k, c, r, s = weights.shape
    out = np.zeros((k, r, s, -(-c // bk) * bk), dtype)
    out[..., :c] = weights.transpose(0, 2, 3, 1)
    return out


def count_bias_floats(k: int) -> int:
    """Floats of a packed bias: whole tiles of any width."""
    return -(-k // 256) * 256 + 256


def pack_bias(bias: np.ndarray | None, k: int) -> np.ndarray:
    """The bias as float32, filled with zeros."""
    out = np.zeros(count_bias_floats(k), np.float32)
    if bias is not None:
        out[:k] = bias
    return out
