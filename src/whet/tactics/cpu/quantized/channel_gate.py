"""A gate on integers: 8-bit channels between pixels times a float for each channel of an image, 8 bits out, in one pass of our own.

As squeeze-and-excitation has it. oneDNN's binary primitive does this in plain loops where there is more than one image.
"""

from __future__ import annotations

from functools import cache
from math import prod

import numpy as np

from whet.backends import Backend
from whet.network import F32, Layer, format_fits, static_shape
from whet.tactics._base import Args, Config, Operand, Signature, Stream, tactic
from whet.tactics._quantized import Parts, taken_apart
from whet.tactics.cpu._llvm import jit
from whet.tactics.cpu._llvm.kernel import LAST_WORDS, Lanes, OwnKernel, OwnTactic, integer_range, numbers, packed_numbers, rounding
from whet.tactics.cpu.onednn._kernel import static
from whet.tactics.cpu.onednn._quantized import QuantizedTactic, needed
from whet.tactics.cpu.onednn.onednn_qmul import integer_and_factor, places_of

_SMALL = 1 << 13  # numbers that one thread has done before the others are there
_WIDE, _ONE = Lanes(16), Lanes(1)


class GateKernel(OwnKernel):
    """A planned gate; its packed operand holds the scales' quotient, both zero points and the integers' bounds."""

    implementation = "own:pixels"

    def __init__(self, layer: Layer, signature: Signature, parts: Parts, count: int) -> None:
        shape = static_shape(layer.outputs[0].shape)
        super().__init__(layer, signature, prod(shape), _SMALL, count)
        self.x, self.factor = integer_and_factor(parts)
        self.images, self.channels, self.pixels = shape[0], shape[1], prod(shape[2:])
        reads, stores = parts.reads[self.x], parts.result
        scale = np.float32(reads.number) / np.float32(stores.number)
        self.packed = (packed_numbers(scale, reads.zero, stores.zero, *integer_range(stores.dtype)),)
        self.signed = reads.dtype.name == "i8"

    def enqueue(self, args: Args, stream: Stream) -> None:
        operands = (("input", self.x), ("input", self.factor), ("output", 0))
        self.launch(stream, _ir(self.signed), "gate", args, (*operands, self.images, self.channels, self.pixels), self.pixels)


@tactic
class Gate(QuantizedTactic, OwnTactic):
    ops = ("Mul",)

    def unfit(self, parts: Parts) -> str | None:
        places = places_of(parts)
        if parts.stores is None or places is None or needed(parts):
            return "multiplies one integer by one floating-point factor and stores integers"
        x, factor = (parts.view.needs(i) for i in places)
        if x.is_constant or factor.is_constant or x.shape != parts.view.outputs[0].shape or x.type.rank < 3:
            return "the integer is an image of the output's shape, and both are computed"
        if tuple(factor.shape) != (*x.shape[:2], *(1,) * (x.type.rank - 2)):
            return "the factor is one number for each channel of each image"
        return None

    def signatures(self, layer: Layer, backend: Backend) -> list[Signature]:
        if self.why_not(layer) or not static(layer) or not format_fits("nhwc", layer.outputs[0].type.rank):
            return []
        parts = taken_apart(layer)
        x, factor = integer_and_factor(parts)
        stored = {x: Operand("nhwc", parts.reads[x].dtype), factor: Operand("nhwc", F32)}
        inputs, out = tuple(stored.get(i) for i in range(len(layer.inputs))), (Operand("nhwc", parts.result.dtype),)
        return [Signature(inputs, out, ((x, 0),)), Signature(inputs, out)]

    def plan(self, layer: Layer, signature: Signature, config: Config, backend: Backend) -> GateKernel:
        return GateKernel(layer, signature, taken_apart(layer), backend.threads)


def _step(lanes: Lanes, s: str, signed: bool) -> str:
    """%z<s> of the integers %q<s> and the factors %g<s>."""
    f, i = lanes.of("float"), lanes.of("i32")
    return f"""
  %x{s} = {"sext" if signed else "zext"} {lanes.of("i8")} %q{s} to {i}
  %v{s} = sitofp {i} %x{s} to {f}
  %d{s} = fsub {f} %v{s}, {lanes.constant("from0")}
  %k{s} = fmul {f} %g{s}, {lanes.constant("scale")}
  %m{s} = fmul {f} %d{s}, %k{s}{lanes.stored(f"%m{s}", s)}"""


@cache
def _ir(signed: bool) -> str:
    """`gate(context)`: for each pixel of a thread's share, 16 channels at a time, then one by one."""
    f, q, wide = _WIDE.of("float"), _WIDE.of("i8"), _WIDE.count
    words = ("source", "factors", "target", "images", "channels", "pixels", *LAST_WORDS)
    return f"""
{rounding(_WIDE, _ONE)}
{jit.opening("gate", words, "pixels")}
  %whole = sub i64 %channels, {wide - 1}
  %size = mul i64 %pixels, %channels
  %line = inttoptr i64 %packed to float*
  %x0 = inttoptr i64 %source to i8*
  %y0 = inttoptr i64 %target to i8*
  %g0 = inttoptr i64 %factors to float*
{numbers(("scale", "from0", "zero", "low", "high"), _WIDE)}
  br label %image
image:
  %n = phi i64 [ 0, %start ], [ %n1, %next ]
  %left = icmp slt i64 %n, %images
  br i1 %left, label %rows, label %done
rows:
  %offset = mul i64 %n, %size
  %xn = getelementptr i8, i8* %x0, i64 %offset
  %yn = getelementptr i8, i8* %y0, i64 %offset
  %offset.g = mul i64 %n, %channels
  %gn = getelementptr float, float* %g0, i64 %offset.g
  br label %pixel
pixel:
  %p = phi i64 [ %from, %rows ], [ %p1, %last ]
  %inside = icmp slt i64 %p, %end
  br i1 %inside, label %row, label %next
row:
  %at = mul i64 %p, %channels
  %xp = getelementptr i8, i8* %xn, i64 %at
  %yp = getelementptr i8, i8* %yn, i64 %at
  br label %wide
wide:
  %w = phi i64 [ 0, %row ], [ %w1, %many ]
  %fits = icmp slt i64 %w, %whole
  br i1 %fits, label %many, label %tail
many:
  %xw = getelementptr i8, i8* %xp, i64 %w
  %xv = bitcast i8* %xw to {q}*
  %q.w = load {q}, {q}* %xv, align 1
  %gw = getelementptr float, float* %gn, i64 %w
  %gv = bitcast float* %gw to {f}*
  %g.w = load {f}, {f}* %gv, align 4
{_step(_WIDE, ".w", signed)}
  %yw = getelementptr i8, i8* %yp, i64 %w
  %yv = bitcast i8* %yw to {q}*
  store {q} %z.w, {q}* %yv, align 1
  %w1 = add i64 %w, {wide}
  br label %wide
tail:
  %t = phi i64 [ %w, %wide ], [ %t1, %one ]
  %some = icmp slt i64 %t, %channels
  br i1 %some, label %one, label %last
one:
  %xt = getelementptr i8, i8* %xp, i64 %t
  %q.t = load i8, i8* %xt
  %gt = getelementptr float, float* %gn, i64 %t
  %g.t = load float, float* %gt
{_step(_ONE, ".t", signed)}
  %yt = getelementptr i8, i8* %yp, i64 %t
  store i8 %z.t, i8* %yt
  %t1 = add i64 %t, 1
  br label %tail
last:
  %p1 = add i64 %p, 1
  br label %pixel
next:
  %n1 = add i64 %n, 1
  br label %image
done:
  ret void
}}
"""
