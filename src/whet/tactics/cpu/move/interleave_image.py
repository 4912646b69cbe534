"""Reformats an image of two to four channels from f32 planes to interleaved channels, f32 or rounded to bf16 or f16, in one pass.

Networks of images begin with it if the first convolution takes channels last. oneDNN's reorder uses a scalar loop; this kernel processes 16
pixels of all channels at once.

Not measured yet: BF16 engines select it for their input; the selections of a CPU were recorded before it was written.
"""

from __future__ import annotations

from functools import cache

from whet.backends import Backend
from whet.network import BF16, DTYPES, F16, F32, DType, Layer, format_fits, static_shape
from whet.tactics._base import Args, Config, Operand, Signature, Stream, tactic
from whet.tactics.cpu._llvm import jit
from whet.tactics.cpu._llvm.builder import FLOAT, INT16, Function, Value
from whet.tactics.cpu._llvm.image import ImageKernel, emit_image_ir, why_not_image
from whet.tactics.cpu._llvm.kernel import CompiledTactic
from whet.tactics.cpu._llvm.packing import round_to_bf16, round_to_small_float
from whet.tactics.cpu.onednn._kernel import is_static


class InterleaveKernel(ImageKernel):
    """A planned reformat."""

    serial_work = 1 << 14  # elements

    def __init__(self, layer: Layer, signature: Signature, count: int) -> None:
        super().__init__(layer, signature, count)
        self.stored = signature.outputs[0].dtype
        self.rtol = {BF16: 2**-8, F16: 2**-11}.get(self.stored, 0.0)

    def enqueue(self, args: Args, stream: Stream) -> None:
        self.launch_pixels(stream, emit_interleave_ir(self.channels, self.stored), "interleave", args)


@tactic
class InterleaveImage(CompiledTactic):
    ops = ("Reformat",)

    def why_not(self, layer: Layer) -> str | None:
        if reason := super().why_not(layer):
            return reason
        a, x = layer.attrs, layer.needs(0)
        if layer.op == "Fused" or x.is_constant:
            return "takes single layers, not fused ones, and no constants"
        if (a["source_format"], a["format"], a["source_dtype"]) != ("linear", "nhwc", "f32") or a["dtype"] not in ("f32", "bf16", "f16"):
            return "moves f32 from row-major to channels last, as f32, bf16 or f16"
        if a["dtype"] == "f16" and not jit.has("f16c") and not jit.has("fphp"):
            return "the CPU does not convert f16"
        return why_not_image(x)

    def signatures(self, layer: Layer, backend: Backend) -> list[Signature]:
        if self.why_not(layer) or not is_static(layer) or not format_fits("nhwc", layer.outputs[0].type.rank):
            return []
        if 0 in static_shape(layer.outputs[0].shape):
            return []
        return [Signature((Operand("linear", F32),), (Operand("nhwc", DTYPES[layer.attrs["dtype"]]),))]

    def plan(self, layer: Layer, signature: Signature, config: Config, backend: Backend) -> InterleaveKernel:
        return InterleaveKernel(layer, signature, backend.threads)


@cache
def emit_interleave_ir(channels: int, stored: DType) -> str:
    """`interleave(context)` for so many channels, rounded to the `stored` type."""

    def convert(f: Function, x: Value) -> Value:
        if stored == F32:
            return x
        return round_to_bf16(f, x) if stored == BF16 else round_to_small_float(f, x, stored)  # keeps denormal numbers, and needs no AVX512-BF16

    return emit_image_ir("interleave", channels, FLOAT if stored == F32 else INT16, lambda _f, _packed: convert)
