"""Reformats an image of two to four channels from f32 planes to interleaved channels, f32 or rounded to bf16, in one pass.

Networks of images begin with it if the first convolution takes channels last. oneDNN's reorder uses a scalar loop; this kernel processes 16
pixels of all channels at once.

Not measured yet: BF16 engines select it for their input; the selections of a CPU were recorded before it was written.
"""

from __future__ import annotations

from functools import cache
from math import prod

from whet.backends import Backend
from whet.network import BF16, F32, Layer, format_fits, static_shape
from whet.tactics._base import Args, Config, Operand, Signature, Stream, tactic
from whet.tactics.cpu._llvm.builder import FLOAT, INT16, LANES, Module, Pointer, Value
from whet.tactics.cpu._llvm.kernel import LAST_WORDS, CompiledKernel, CompiledTactic
from whet.tactics.cpu._llvm.packing import interleave, round_to_bf16
from whet.tactics.cpu._llvm.work_stealing import parallel_kernel
from whet.tactics.cpu.onednn._kernel import is_static

_CHANNELS = (2, 3, 4)
_WORDS = ("source", "target", "samples", "pixels", *LAST_WORDS)


class InterleaveKernel(CompiledKernel):
    """A planned reformat."""

    serial_work = 1 << 14  # elements

    def __init__(self, layer: Layer, signature: Signature, count: int) -> None:
        shape = static_shape(layer.needs(0).shape)
        super().__init__(layer, signature, prod(shape), count)
        self.images, self.channels, self.pixels = shape[0], shape[1], prod(shape[2:])
        self.rounds = signature.outputs[0].dtype == BF16
        self.rtol = 2**-8 if self.rounds else 0.0
        self.implementation = f"{self.channels} channels"

    def enqueue(self, args: Args, stream: Stream) -> None:
        words = (("input", 0), ("output", 0), self.images, self.pixels)
        self.launch(stream, emit_interleave_ir(self.channels, self.rounds), "interleave", args, words, self.pixels, LANES)


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
        if x.type.rank < 3 or not isinstance(x.shape[1], int) or x.shape[1] not in _CHANNELS:
            return f"takes images of {', '.join(map(str, _CHANNELS))} channels"
        return None

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
    """`interleave(context)` for so many channels, with `rounds` to bf16: 16 pixels at a time, the rest of a thread's share pixel by pixel."""
    module = Module()
    with parallel_kernel(module, "interleave", _WORDS, "pixels") as (f, w):
        end_of_vectors = w.end - (LANES - 1)
        size = w.pixels * channels
        source, target = w.source.as_pointer(FLOAT), w.target.as_pointer(INT16 if rounds else FLOAT)
        with f.loop(0, w.samples) as samples:
            x, y = source.at(samples.index * size), target.at(samples.index * size)

            def emit_planes(pixel: Value, lanes: int, x: Pointer = x) -> list[Value]:
                """The stored values of the pixels from `pixel` on, for each channel."""
                planes = [x.load(w.pixels * c + pixel, lanes) for c in range(channels)]
                return [round_to_bf16(f, plane) for plane in planes] if rounds else planes

            with f.loop(w.begin, end_of_vectors, step=LANES) as vectors:
                y.store(interleave(f, emit_planes(vectors.index, LANES)), vectors.index * channels)
            with f.loop(vectors.index, w.end) as rest:
                for c, value in enumerate(emit_planes(rest.index, 1)):
                    y.store(value, rest.index * channels + c)
    return str(module)
