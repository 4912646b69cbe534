"""Reformats an image of two to four channels from f32 planes to interleaved channels, f32 or rounded to bf16, in one pass.

Networks of images begin with it if the first convolution takes channels last. oneDNN's reorder uses a scalar loop; this kernel processes 16
pixels of all channels at once.

Not measured yet: BF16 engines select it for their input; the selections of a CPU were recorded before it was written.
"""

from __future__ import annotations

from functools import cache

from whet.backends import Backend
from whet.network import BF16, F32, Layer, format_fits, static_shape
from whet.tactics._base import Args, Config, Operand, Signature, Stream, tactic
from whet.tactics.cpu._llvm.builder import FLOAT, INT16
from whet.tactics.cpu._llvm.image import ImageKernel, emit_image_ir, why_not_image
from whet.tactics.cpu._llvm.kernel import CompiledTactic
from whet.tactics.cpu._llvm.packing import round_to_bf16
from whet.tactics.cpu.onednn._kernel import is_static


class InterleaveKernel(ImageKernel):
    """A planned reformat."""

    serial_work = 1 << 14  # elements

    def __init__(self, layer: Layer, signature: Signature, count: int) -> None:
        super().__init__(layer, signature, count)
        self.rounds = signature.outputs[0].dtype == BF16
        self.rtol = 2**-8 if self.rounds else 0.0

    def enqueue(self, args: Args, stream: Stream) -> None:
        self.launch_pixels(stream, emit_interleave_ir(self.channels, self.rounds), "interleave", args)


@tactic
class InterleaveImage(CompiledTactic):
    ops = ("Reformat",)

    def why_not(self, layer: Layer) -> str | None:
        if reason := super().why_not(layer):
            return reason
        a, x = layer.attrs, layer.needs(0)
        if layer.op == "Fused" or x.is_constant:
            return "takes single layers, not fused ones, and no constants"
        if (a["source_format"], a["format"], a["source_dtype"]) != ("linear", "nhwc", "f32") or a["dtype"] not in ("f32", "bf16"):
            return "moves f32 from row-major to channels last, as f32 or bf16"
        return why_not_image(x)

    def signatures(self, layer: Layer, backend: Backend) -> list[Signature]:
        if self.why_not(layer) or not is_static(layer) or not format_fits("nhwc", layer.outputs[0].type.rank):
            return []
        if 0 in static_shape(layer.outputs[0].shape):
            return []
        target = BF16 if layer.attrs["dtype"] == "bf16" else F32
        return [Signature((Operand("linear", F32),), (Operand("nhwc", target),))]

    def plan(self, layer: Layer, signature: Signature, config: Config, backend: Backend) -> InterleaveKernel:
        return InterleaveKernel(layer, signature, backend.threads)


@cache
def emit_interleave_ir(channels: int, rounds: bool) -> str:
    """`interleave(context)` for so many channels, with `rounds` to bf16."""
    return emit_image_ir("interleave", channels, INT16 if rounds else FLOAT, lambda _f, _packed: round_to_bf16 if rounds else lambda _f, x: x)
