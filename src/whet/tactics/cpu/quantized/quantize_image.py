"""Quantizing an image on its way between pixels: planes of floats in, interleaved 8-bit channels out, in one pass of our own.

What a network of images begins with. oneDNN's reorder does it number by number; here 16 pixels of all (two to four) channels at once.
"""

from __future__ import annotations

from functools import cache
from math import prod

import numpy as np

from whet.backends import Backend
from whet.network import F32, Layer, format_fits, static_shape
from whet.tactics._base import Args, Config, Operand, Signature, Stream, tactic
from whet.tactics.cpu._llvm import jit
from whet.tactics.cpu._llvm.kernel import LAST_WORDS, Lanes, OwnKernel, OwnTactic, integer_range, numbers, packed_numbers, rounding
from whet.tactics.cpu.onednn._kernel import static
from whet.tactics.cpu.onednn.onednn_quantize import scales_of_layer

_CHANNELS = (2, 3, 4)
_WIDE, _ONE = Lanes(16), Lanes(1)  # pixels at once
_SMALL = 1 << 13  # numbers that one thread has done before the others are there


class ImageKernel(OwnKernel):
    """A planned quantization; its packed operand holds factor, zero point and the integers' bounds."""

    def __init__(self, layer: Layer, signature: Signature, count: int) -> None:
        shape = static_shape(layer.needs(0).shape)
        super().__init__(layer, signature, prod(shape), _SMALL, count)
        self.images, self.channels, self.pixels = shape[0], shape[1], prod(shape[2:])
        _, values, zero = scales_of_layer(layer)
        self.packed = (packed_numbers(np.float32(1) / values[0], zero, *integer_range(layer.outputs[0].dtype)),)
        self.implementation = f"own:{self.channels} channels"

    def enqueue(self, args: Args, stream: Stream) -> None:
        words = (("input", 0), ("output", 0), self.images, self.pixels)
        self.launch(stream, _ir(self.channels), "quantize", args, words, self.pixels, _WIDE.count)


@tactic
class QuantizeImage(OwnTactic):
    """Its numbers are the op's but for ties: x / scale is x times the scale's inverse."""

    ops = ("QuantizeLinear",)

    def why_not(self, layer: Layer) -> str | None:
        said = super().why_not(layer)
        if said:
            return said
        x, zero = layer.inputs[0], layer.input(2)
        if layer.op == "Fused" or x is None or x.is_constant or x.dtype != F32 or layer.outputs[0].dtype.name not in ("i8", "u8"):
            return "quantizes computed f32 to 8 bits, alone"
        if any(t is not None and (not t.is_constant or t.type.elements != 1) for t in (layer.inputs[1], zero)) or layer.attrs["block_size"]:
            return "has not one scale that is known"
        if x.type.rank < 3 or not isinstance(x.shape[1], int) or x.shape[1] not in _CHANNELS:
            return f"is for images of {', '.join(map(str, _CHANNELS))} channels"
        return None

    def signatures(self, layer: Layer, backend: Backend) -> list[Signature]:
        if self.why_not(layer) or not static(layer) or not format_fits("nhwc", layer.outputs[0].type.rank):
            return []
        rest = (None,) * (len(layer.inputs) - 1)
        return [Signature((Operand("linear", F32), *rest), (Operand("nhwc", layer.outputs[0].dtype),))]

    def plan(self, layer: Layer, signature: Signature, config: Config, backend: Backend) -> ImageKernel:
        return ImageKernel(layer, signature, backend.threads)


def _each(channels: int, lanes: Lanes, s: str, at: str) -> str:
    """%z<s><c> for each channel c: the integers of the pixels from %<at> on."""
    f = lanes.of("float")
    return "\n".join(
        f"""  %f{s}{c} = mul i64 %pixels, {c}
  %n{s}{c} = add i64 %f{s}{c}, %{at}
  %p{s}{c} = getelementptr float, float* %x, i64 %n{s}{c}
  %v{s}{c} = bitcast float* %p{s}{c} to {f}*
  %x{s}{c} = load {f}, {f}* %v{s}{c}, align 4
  %m{s}{c} = fmul {f} %x{s}{c}, {lanes.constant("factor")}{lanes.stored(f"%m{s}{c}", f"{s}{c}")}"""
        for c in range(channels)
    )


def _mixed(channels: int) -> str:
    """Stores %z.w<c> of 16 pixels as they lie between each other."""
    n, q = _WIDE.count, _WIDE.of("i8")
    pair, joined = f"<{2 * n} x i8>", f"<{n * channels} x i8>"
    both = ", ".join(f"i32 {i}" for i in range(2 * n))
    order = ", ".join(f"i32 {c * n + p}" for p in range(n) for c in range(channels))
    last, more = "%z.w2" if channels > 2 else "undef", "%z.w3" if channels > 3 else "undef"
    return f"""  %front = shufflevector {q} %z.w0, {q} %z.w1, <{2 * n} x i32> <{both}>
  %back = shufflevector {q} {last}, {q} {more}, <{2 * n} x i32> <{both}>
  %mixed = shufflevector {pair} %front, {pair} %back, <{n * channels} x i32> <{order}>
  %at = mul i64 %w, {channels}
  %yp = getelementptr i8, i8* %y, i64 %at
  %yv = bitcast i8* %yp to {joined}*
  store {joined} %mixed, {joined}* %yv, align 1"""


def _one_by_one(channels: int) -> str:
    """Stores %z.t<c> of one pixel."""
    return "\n".join(
        f"""  %tb{c} = mul i64 %i, {channels}
  %tc{c} = add i64 %tb{c}, {c}
  %ty{c} = getelementptr i8, i8* %y, i64 %tc{c}
  store i8 %z.t{c}, i8* %ty{c}"""
        for c in range(channels)
    )


@cache
def _ir(channels: int) -> str:
    """`quantize(context)` for so many channels: 16 pixels at a time, what is left of a thread's share pixel by pixel."""
    words = ("source", "target", "images", "pixels", *LAST_WORDS)
    return f"""
{rounding(_WIDE, _ONE)}
{jit.opening("quantize", words, "pixels")}
  %whole = sub i64 %end, {_WIDE.count - 1}
  %size = mul i64 %pixels, {channels}
  %line = inttoptr i64 %packed to float*
  %x.0 = inttoptr i64 %source to float*
  %y.0 = inttoptr i64 %target to i8*
{numbers(("factor", "zero", "low", "high"), _WIDE)}
  br label %image
image:
  %n = phi i64 [ 0, %start ], [ %n1, %next ]
  %left = icmp slt i64 %n, %images
  br i1 %left, label %begin, label %done
begin:
  %offset = mul i64 %n, %size
  %x = getelementptr float, float* %x.0, i64 %offset
  %y = getelementptr i8, i8* %y.0, i64 %offset
  br label %wide
wide:
  %w = phi i64 [ %from, %begin ], [ %w1, %many ]
  %fits = icmp slt i64 %w, %whole
  br i1 %fits, label %many, label %tail
many:
{_each(channels, _WIDE, ".w", "w")}
{_mixed(channels)}
  %w1 = add i64 %w, {_WIDE.count}
  br label %wide
tail:
  %i = phi i64 [ %w, %wide ], [ %i1, %one ]
  %some = icmp slt i64 %i, %end
  br i1 %some, label %one, label %next
one:
{_each(channels, _ONE, ".t", "i")}
{_one_by_one(channels)}
  %i1 = add i64 %i, 1
  br label %tail
next:
  %n1 = add i64 %n, 1
  br label %image
done:
  ret void
}}
"""
