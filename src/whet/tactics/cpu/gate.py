"""A gate on integers: 8-bit channels between pixels times a float for each channel of an image, 8 bits out, in one pass of our own.

As squeeze-and-excitation has it. oneDNN's binary primitive does this in plain loops where there is more than one image.
"""

from __future__ import annotations

from functools import cache
from math import prod
from typing import Any

import numpy as np

from whet.backends.cpu import threads
from whet.network import F32, Layer, format_fits, static_shape
from whet.tactics._base import Args, Config, Operand, Packed, Signature, Stream, Tactic, stored_bytes, tactic
from whet.tactics._quantized import Parts, take_apart
from whet.tactics.cpu import _jit
from whet.tactics.cpu._declared import Reference
from whet.tactics.cpu._kernel import static
from whet.tactics.cpu._quantized import needed
from whet.tactics.cpu.onednn_qmul import places_of

_SMALL = 1 << 13  # numbers that one thread has done before the others are there
_WIDE = 16


class GateKernel:
    """A planned gate; its packed operand holds the scales' quotient, both zero points and the integers' bounds."""

    scratch, rtol, deterministic = 0, 0.0, True

    def __init__(self, layer: Layer, signature: Signature, parts: Parts, count: int) -> None:
        assert parts.stores is not None
        self.x, self.factor = places_of(parts)  # type: ignore[misc]
        self.inputs, self.outputs = stored_bytes(layer, signature)
        shape = static_shape(layer.outputs[0].shape)
        self.images, self.channels, self.pixels = shape[0], shape[1], prod(shape[2:])
        reads, stores = parts.reads[self.x], parts.stores
        low, high = (-128, 127) if stores.dtype.name == "i8" else (0, 255)
        numbers = np.array([np.float32(reads.number) / np.float32(stores.number), reads.zero, stores.zero, low, high], np.float32)
        self.packed = (Packed(f"line|{numbers.tobytes().hex()}", numbers.nbytes, lambda: numbers.view(np.uint8)),)
        self.threads = count if prod(shape) > _SMALL else 1
        self.signed = reads.dtype.name == "i8"
        self.implementation = "own:pixels"

    def enqueue(self, args: Args, stream: Stream) -> None:
        ir = _ir(self.signed)
        ask = threads.address("omp_get_thread_num") if self.threads > 1 else _jit.address(ir, "first")
        share = -(-self.pixels // self.threads)
        context = [args.inputs[self.x], args.inputs[self.factor], args.outputs[0], self.images, self.pixels, self.channels, share]
        operands = {("input", self.x): 0, ("input", self.factor): 1, ("output", 0): 2}
        call = _jit.ParallelCall(_jit.address(ir, "gate"), [*context, args.packed[0], ask], operands, self.threads, self.implementation)
        stream.record(call)


@tactic
class Gate(Tactic):
    ops = ("Mul",)
    quantized = True

    def why_not(self, layer: Layer) -> str | None:
        said = super().why_not(layer) or _jit.available()
        if said:
            return said
        parts = take_apart(layer)
        if isinstance(parts, str):
            return parts
        places = places_of(parts)
        if parts.stores is None or places is None or needed(parts):
            return "multiplies one integer by one floating-point factor and stores integers"
        x, factor = (parts.view.inputs[i] for i in places)
        assert x is not None
        assert factor is not None
        if x.is_constant or factor.is_constant or x.shape != parts.view.outputs[0].shape or x.type.rank < 3:
            return "the integer is an image of the output's shape, and both are computed"
        if tuple(factor.shape) != (*x.shape[:2], *(1,) * (x.type.rank - 2)):
            return "the factor is one number for each channel of each image"
        return None

    def signatures(self, layer: Layer, machine: Any) -> list[Signature]:
        if self.why_not(layer) or not static(layer) or not format_fits("nhwc", layer.outputs[0].type.rank):
            return []
        parts = take_apart(layer)
        assert isinstance(parts, Parts)
        assert parts.stores is not None
        x, factor = places_of(parts)  # type: ignore[misc]
        stored = {x: Operand("nhwc", parts.reads[x].dtype), factor: Operand("nhwc", F32)}
        inputs, out = tuple(stored.get(i) for i in range(len(layer.inputs))), (Operand("nhwc", parts.stores.dtype),)
        return [Signature(inputs, out, ((x, 0),)), Signature(inputs, out)]

    def plan(self, layer: Layer, signature: Signature, config: Config, machine: Any) -> GateKernel:
        parts = take_apart(layer)
        assert isinstance(parts, Parts)
        return GateKernel(layer, signature, parts, machine.threads)

    def declares(self, layer: Layer, implementation: str) -> list[dict[str, Reference]]:
        """Nothing but ties: the scales are multiplied first."""
        return [{}]

    def library_version(self) -> str:
        return _jit.version()


@cache
def _ir(signed: bool) -> str:
    """`gate(context)`: for each pixel of a thread's share, 16 channels at a time, then one by one."""
    f, i, q, b = (f"<{_WIDE} x {t}>" for t in ("float", "i32", "i8", "i1"))
    widen = "sext" if signed else "zext"
    words = ("source", "factors", "target", "images", "pixels", "channels", "share", "lines", "ask")
    numbers = "\n".join(
        f"  %{n}.p = getelementptr float, float* %line, i64 {k}\n  %{n} = load float, float* %{n}.p\n"
        f"  %{n}.one = insertelement {f} undef, float %{n}, i32 0\n"
        f"  %{n}s = shufflevector {f} %{n}.one, {f} undef, <{_WIDE} x i32> zeroinitializer"
        for k, n in enumerate(("scale", "from0", "to0", "low", "high"))
    )

    def step(t: str, boolean: str, integer: str, byte: str, s: str, many: str) -> str:
        """One step on type `t`: names end in `s`, constants in `many`."""
        return f"""
  %x{s} = {widen} {byte} %q{s} to {integer}
  %v{s} = sitofp {integer} %x{s} to {t}
  %d{s} = fsub {t} %v{s}, %from0{many}
  %k{s} = fmul {t} %g{s}, %scale{many}
  %m{s} = fmul {t} %d{s}, %k{s}
  %r{s} = call {t} @llvm.rint.{"f32" if t == "float" else f"v{_WIDE}f32"}({t} %m{s})
  %o{s} = fadd {t} %r{s}, %to0{many}
  %a{s} = fcmp ogt {t} %o{s}, %low{many}
  %b{s} = select {boolean} %a{s}, {t} %o{s}, {t} %low{many}
  %c{s} = fcmp olt {t} %b{s}, %high{many}
  %e{s} = select {boolean} %c{s}, {t} %b{s}, {t} %high{many}
  %i{s} = fptosi {t} %e{s} to {integer}
  %z{s} = trunc {integer} %i{s} to {byte}"""

    return f"""
declare {f} @llvm.rint.v{_WIDE}f32({f})
declare float @llvm.rint.f32(float)
{_jit.opening("gate", words, "pixels")}
  %whole = sub i64 %channels, {_WIDE - 1}
  %size = mul i64 %pixels, %channels
  %line = inttoptr i64 %lines to float*
  %x0 = inttoptr i64 %source to i8*
  %y0 = inttoptr i64 %target to i8*
  %g0 = inttoptr i64 %factors to float*
{numbers}
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
{step(f, b, i, q, ".w", "s")}
  %yw = getelementptr i8, i8* %yp, i64 %w
  %yv = bitcast i8* %yw to {q}*
  store {q} %z.w, {q}* %yv, align 1
  %w1 = add i64 %w, {_WIDE}
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
{step("float", "i1", "i32", "i8", ".t", "")}
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
