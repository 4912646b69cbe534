"""A function of one 8-bit integer, whatever it computes on the way: a table of 256 results, looked up by a kernel of our own.

With AVX-512 VBMI 64 results come from two instructions, so that SiLU or GELU costs what reading and writing the bytes costs; else one
result at a time. The table is made by the reference, so results are the reference's own.
"""

from __future__ import annotations

import numpy as np

from whet.backends import Backend
from whet.network import DType, Layer, Tensor, format_fits
from whet.ops import run_layer
from whet.tactics._base import Args, Config, Operand, Packed, Signature, Stream, stored_bytes, tactic
from whet.tactics.cpu._llvm import jit
from whet.tactics.cpu._llvm.kernel import LAST_WORDS, OwnKernel, OwnTactic
from whet.tactics.cpu.onednn._kernel import static

KIND = "QuantizedTable"
_SMALL = 1 << 15  # bytes that one thread has done before the others are there
_STEP = 64

_IR = """
declare <64 x i8> @llvm.x86.avx512.vpermi2var.qi.512(<64 x i8>, <64 x i8>, <64 x i8>)
<OPENING>
  %t = inttoptr i64 %packed to i8*
  %x = inttoptr i64 %source to i8*
  %y = inttoptr i64 %target to i8*
<WIDE>
tail:
  %i = phi i64 <COMES>, [ %i1, %one ]
  %more = icmp slt i64 %i, %end
  br i1 %more, label %one, label %done
one:
  %xp = getelementptr i8, i8* %x, i64 %i
  %q = load i8, i8* %xp
  %at = zext i8 %q to i64
  %tp = getelementptr i8, i8* %t, i64 %at
  %r = load i8, i8* %tp
  %yp = getelementptr i8, i8* %y, i64 %i
  store i8 %r, i8* %yp
  %i1 = add i64 %i, 1
  br label %tail
done:
  ret void
}
"""
_WIDE = """
  %t1 = getelementptr i8, i8* %t, i64 64
  %t2 = getelementptr i8, i8* %t, i64 128
  %t3 = getelementptr i8, i8* %t, i64 192
  %v0 = bitcast i8* %t to <64 x i8>*
  %v1 = bitcast i8* %t1 to <64 x i8>*
  %v2 = bitcast i8* %t2 to <64 x i8>*
  %v3 = bitcast i8* %t3 to <64 x i8>*
  %a = load <64 x i8>, <64 x i8>* %v0, align 1
  %b = load <64 x i8>, <64 x i8>* %v1, align 1
  %c = load <64 x i8>, <64 x i8>* %v2, align 1
  %d = load <64 x i8>, <64 x i8>* %v3, align 1
  %whole = sub i64 %end, 63
  br label %wide
wide:
  %w = phi i64 [ %from, %start ], [ %w1, %many ]
  %fits = icmp slt i64 %w, %whole
  br i1 %fits, label %many, label %tail
many:
  %wxp = getelementptr i8, i8* %x, i64 %w
  %wx = bitcast i8* %wxp to <64 x i8>*
  %wq = load <64 x i8>, <64 x i8>* %wx, align 1
  %low = call <64 x i8> @llvm.x86.avx512.vpermi2var.qi.512(<64 x i8> %a, <64 x i8> %wq, <64 x i8> %b)
  %high = call <64 x i8> @llvm.x86.avx512.vpermi2var.qi.512(<64 x i8> %c, <64 x i8> %wq, <64 x i8> %d)
  %upper = icmp slt <64 x i8> %wq, zeroinitializer
  %wr = select <64 x i1> %upper, <64 x i8> %high, <64 x i8> %low
  %wyp = getelementptr i8, i8* %y, i64 %w
  %wy = bitcast i8* %wyp to <64 x i8>*
  store <64 x i8> %wr, <64 x i8>* %wy, align 1
  %w1 = add i64 %w, 64
  br label %wide
"""


def _ir(wide: bool) -> str:
    ir = _IR.replace("<OPENING>", jit.opening("look_up", ("source", "target", "count", *LAST_WORDS), "count"))
    if wide:
        return ir.replace("<WIDE>", _WIDE.strip("\n")).replace("<COMES>", "[ %w, %wide ]")
    plain = ir.replace("<WIDE>", "  br label %tail").replace("<COMES>", "[ %from, %start ]")
    return plain.replace("declare <64 x i8> @llvm.x86.avx512.vpermi2var.qi.512(<64 x i8>, <64 x i8>, <64 x i8>)\n", "")


class TableKernel(OwnKernel):
    """A planned look-up; its one packed operand is the table."""

    def __init__(self, layer: Layer, signature: Signature, wide: bool, count: int) -> None:
        super().__init__(layer, signature, stored_bytes(layer, signature)[1][0], _SMALL, count)
        self.x = next(i for i, o in enumerate(signature.inputs) if o is not None)
        results = table(layer)
        self.packed = (Packed(f"table|{results.tobytes().hex()}", 256, lambda: results.view(np.uint8)),)
        self.wide = wide
        self.implementation = "own:avx512_vbmi" if wide else "own:scalar"

    def enqueue(self, args: Args, stream: Stream) -> None:
        size = self.outputs[0]
        self.launch(stream, _ir(self.wide), "look_up", args, (("input", self.x), ("output", 0), size), size, _STEP)


@tactic
class Table(OwnTactic):
    composites = (KIND,)
    quantized = True

    def why_not(self, layer: Layer) -> str | None:
        if layer.composite != KIND:
            return "looks up what is a function of one 8-bit integer"
        return jit.available()

    def signatures(self, layer: Layer, backend: Backend) -> list[Signature]:
        """In any format, in place or not: it does the same to every number."""
        if self.why_not(layer) or not static(layer):
            return []
        x, found = _integer(layer), []
        for f in ("nhwc", "linear"):
            if format_fits(f, layer.outputs[0].type.rank):
                inputs = tuple(Operand(f, t.dtype) if i == x else None for i, t in enumerate(layer.inputs))
                out = (Operand(f, layer.outputs[0].dtype),)
                found += [Signature(inputs, out, ((x, 0),)), Signature(inputs, out)]
        return found

    def plan(self, layer: Layer, signature: Signature, config: Config, backend: Backend) -> TableKernel:
        return TableKernel(layer, signature, jit.has("avx512vbmi"), backend.threads)


def _integer(layer: Layer) -> int:
    """Place of the input that is looked up."""
    (place,) = (i for i, t in enumerate(layer.inputs) if t is not None and not t.is_constant)
    return place


def table(layer: Layer) -> np.ndarray:
    """The layer's result for each of the 256 bytes that its integer may be, in the order of the bytes; by the reference."""
    body, x = layer.regions["body"], _integer(layer)
    values: dict[Tensor, np.ndarray] = {}
    for i, (inner, t) in enumerate(zip(body.inputs, map(layer.needs, range(len(layer.inputs))), strict=True)):
        values[inner] = _all(t.dtype) if i == x else t.array()
    values |= {t: t.array() for t in body.constants.values()}
    for step in body.layers:
        arrays = [None if t is None else values[t] for t in step.inputs]
        values[step.output] = run_layer(step, [a.reshape(()) if a is not None and a.size == 1 else a for a in arrays])[0]
    out = np.asarray(values[body.outputs[0]])
    assert out.shape == (256,), f"{layer.name} is no function of one integer"
    return np.ascontiguousarray(out)


def _all(dtype: DType) -> np.ndarray:
    """All values of an 8-bit type in the order of their bytes."""
    return np.arange(256, dtype=np.uint8).view(dtype.numpy)
