"""Quantizing an image on its way between pixels: planes of floats in, interleaved 8-bit channels out, in one pass of our own.

What a network of images begins with. oneDNN's reorder does it number by number; here 16 pixels of all (two to four) channels at once.
"""

from __future__ import annotations

from functools import cache
from math import prod
from typing import Any

import numpy as np

from whet.backends.cpu import threads
from whet.network import F32, Layer, format_fits, static_shape
from whet.tactics._base import Args, Config, Operand, Packed, Signature, Stream, Tactic, stored_bytes, tactic
from whet.tactics.cpu import _jit
from whet.tactics.cpu._declared import Reference
from whet.tactics.cpu._kernel import static
from whet.tactics.cpu.onednn_quantize import scales_of_layer

_CHANNELS = (2, 3, 4)
_WIDE = 16  # pixels at once
_SMALL = 1 << 13  # numbers that one thread has done before the others are there


class ImageKernel:
    """A planned quantization; its packed operand holds factor, zero point and the integers' bounds."""

    scratch, rtol, deterministic = 0, 0.0, True

    def __init__(self, layer: Layer, signature: Signature, count: int) -> None:
        x, y = layer.needs(0), layer.outputs[0]
        shape = static_shape(x.shape)
        self.images, self.channels, self.pixels = shape[0], shape[1], prod(shape[2:])
        self.inputs, self.outputs = stored_bytes(layer, signature)
        _, values, shift = scales_of_layer(layer)
        low, high = (-128, 127) if y.dtype.name == "i8" else (0, 255)
        numbers = np.array([np.float32(1) / values[0], shift, low, high], np.float32)
        self.packed = (Packed(f"line|{numbers.tobytes().hex()}", numbers.nbytes, lambda: numbers.view(np.uint8)),)
        self.threads = count if self.pixels * self.channels * self.images > _SMALL else 1
        self.implementation = f"own:{self.channels} channels"

    def enqueue(self, args: Args, stream: Stream) -> None:
        ir = _ir(self.channels)
        ask = threads.address("omp_get_thread_num") if self.threads > 1 else _jit.address(ir, "first")
        share = -(-self.pixels // (self.threads * _WIDE)) * _WIDE
        context = [args.inputs[0], args.outputs[0], self.images, self.pixels, share, args.packed[0], ask]
        operands = {("input", 0): 0, ("output", 0): 1}
        stream.record(_jit.ParallelCall(_jit.address(ir, "quantize"), context, operands, self.threads, self.implementation))


@tactic
class QuantizeImage(Tactic):
    ops = ("QuantizeLinear",)

    def why_not(self, layer: Layer) -> str | None:
        said = super().why_not(layer) or _jit.available()
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

    def signatures(self, layer: Layer, machine: Any) -> list[Signature]:
        if self.why_not(layer) or not static(layer) or not format_fits("nhwc", layer.outputs[0].type.rank):
            return []
        rest = (None,) * (len(layer.inputs) - 1)
        return [Signature((Operand("linear", F32), *rest), (Operand("nhwc", layer.outputs[0].dtype),))]

    def plan(self, layer: Layer, signature: Signature, config: Config, machine: Any) -> ImageKernel:
        return ImageKernel(layer, signature, machine.threads)

    def declares(self, layer: Layer, implementation: str) -> list[dict[str, Reference]]:
        """Nothing but ties: x / scale is x times the scale's inverse."""
        return [{}]

    def library_version(self) -> str:
        return _jit.version()


@cache
def _ir(channels: int) -> str:
    """`quantize(context)` for so many channels: 16 pixels at a time, what is left of a thread's share pixel by pixel."""
    f, q = f"<{_WIDE} x float>", f"<{_WIDE} x i8>"
    wide, joined = _WIDE * channels, f"<{_WIDE * channels} x i8>"
    lines = []
    for c in range(channels):
        lines += [
            f"  %o{c} = mul i64 %pixels, {c}",
            f"  %a{c} = add i64 %o{c}, %w",
            f"  %e{c} = getelementptr float, float* %x, i64 %a{c}",
            f"  %v{c} = bitcast float* %e{c} to {f}*",
            f"  %x{c} = load {f}, {f}* %v{c}, align 4",
            f"  %m{c} = fmul {f} %x{c}, %factors",
            f"  %r{c} = call {f} @llvm.rint.v{_WIDE}f32({f} %m{c})",
            f"  %s{c} = fadd {f} %r{c}, %shifts",
            f"  %g{c} = fcmp ogt {f} %s{c}, %lows",
            f"  %h{c} = select <{_WIDE} x i1> %g{c}, {f} %s{c}, {f} %lows",
            f"  %j{c} = fcmp olt {f} %h{c}, %highs",
            f"  %k{c} = select <{_WIDE} x i1> %j{c}, {f} %h{c}, {f} %highs",
            f"  %u{c} = fptosi {f} %k{c} to <{_WIDE} x i32>",
            f"  %q{c} = trunc <{_WIDE} x i32> %u{c} to {q}",
        ]
    pair, both = f"<{2 * _WIDE} x i8>", ", ".join(f"i32 {i}" for i in range(2 * _WIDE))
    last = "%q2" if channels > 2 else "undef"
    more = "%q3" if channels > 3 else "undef"
    order = [i * _WIDE + p for p in range(_WIDE) for i in range(channels)]
    lines += [
        f"  %front = shufflevector {q} %q0, {q} %q1, <{2 * _WIDE} x i32> <{both}>",
        f"  %back = shufflevector {q} {last}, {q} {more}, <{2 * _WIDE} x i32> <{both}>",
        f"  %mixed = shufflevector {pair} %front, {pair} %back, <{wide} x i32> <{', '.join(f'i32 {i}' for i in order)}>",
        f"  %at = mul i64 %w, {channels}",
        "  %yp = getelementptr i8, i8* %y, i64 %at",
        f"  %yv = bitcast i8* %yp to {joined}*",
        f"  store {joined} %mixed, {joined}* %yv, align 1",
    ]
    single = []
    for c in range(channels):
        single += [
            f"  %to{c} = mul i64 %pixels, {c}",
            f"  %ta{c} = add i64 %to{c}, %i",
            f"  %tp{c} = getelementptr float, float* %x, i64 %ta{c}",
            f"  %tx{c} = load float, float* %tp{c}",
            f"  %tm{c} = fmul float %tx{c}, %factor",
            f"  %tr{c} = call float @llvm.rint.f32(float %tm{c})",
            f"  %ts{c} = fadd float %tr{c}, %shift",
            f"  %tg{c} = fcmp ogt float %ts{c}, %low",
            f"  %th{c} = select i1 %tg{c}, float %ts{c}, float %low",
            f"  %tj{c} = fcmp olt float %th{c}, %high",
            f"  %tk{c} = select i1 %tj{c}, float %th{c}, float %high",
            f"  %ti{c} = fptosi float %tk{c} to i32",
            f"  %tq{c} = trunc i32 %ti{c} to i8",
            f"  %tb{c} = mul i64 %i, {channels}",
            f"  %tc{c} = add i64 %tb{c}, {c}",
            f"  %ty{c} = getelementptr i8, i8* %y, i64 %tc{c}",
            f"  store i8 %tq{c}, i8* %ty{c}",
        ]
    names = ("factor", "shift", "low", "high")
    loads = []
    for i, n in enumerate(names):
        loads += [
            f"  %{n}.p = getelementptr float, float* %line, i64 {i}",
            f"  %{n} = load float, float* %{n}.p",
            f"  %{n}.one = insertelement {f} undef, float %{n}, i32 0",
            f"  %{n}s = shufflevector {f} %{n}.one, {f} undef, <{_WIDE} x i32> zeroinitializer",
        ]
    return f"""
declare {f} @llvm.rint.v{_WIDE}f32({f})
declare float @llvm.rint.f32(float)
{_jit.opening("quantize", ("source", "target", "images", "pixels", "share", "lines", "ask"), "pixels")}
  %whole = sub i64 %end, {_WIDE - 1}
  %size = mul i64 %pixels, {channels}
  %line = inttoptr i64 %lines to float*
  %x.0 = inttoptr i64 %source to float*
  %y.0 = inttoptr i64 %target to i8*
{chr(10).join(loads)}
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
{chr(10).join(lines)}
  %w1 = add i64 %w, {_WIDE}
  br label %wide
tail:
  %i = phi i64 [ %w, %wide ], [ %i1, %one ]
  %some = icmp slt i64 %i, %end
  br i1 %some, label %one, label %next
one:
{chr(10).join(single)}
  %i1 = add i64 %i, 1
  br label %tail
next:
  %n1 = add i64 %n, 1
  br label %image
done:
  ret void
}}
"""
