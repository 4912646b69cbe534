"""Quantizes an image of two to four channels from f32 planes to interleaved 8-bit channels in one pass.

Networks of images begin with it. oneDNN's reorder uses a scalar loop; this kernel processes 16 pixels of all channels at once.

Measured: docs/notes/cpu_kernels.md, five times as fast as oneDNN.
"""

from __future__ import annotations

from functools import cache
from math import prod

import numpy as np

from whet.backends import Backend
from whet.network import F32, Layer, format_fits, static_shape
from whet.tactics._base import Args, Config, Operand, Signature, Stream, tactic
from whet.tactics.cpu._llvm.builder import FLOAT, INT8, LANES, Module, Pointer, Value
from whet.tactics.cpu._llvm.kernel import (
    LAST_WORDS,
    CompiledKernel,
    CompiledTactic,
    get_integer_range,
    load_parameters,
    make_packed_parameters,
    to_int8,
)
from whet.tactics.cpu._llvm.packing import interleave
from whet.tactics.cpu._llvm.work_stealing import parallel_kernel
from whet.tactics.cpu.onednn._kernel import is_static
from whet.tactics.cpu.onednn.onednn_quantize import get_scales

_CHANNELS = (2, 3, 4)
_WORDS = ("source", "target", "samples", "pixels", *LAST_WORDS)


class ImageKernel(CompiledKernel):
    """A planned quantization; its packed operand holds factor, zero point and the integers' bounds."""

    serial_work = 1 << 13  # elements

    def __init__(self, layer: Layer, signature: Signature, count: int) -> None:
        shape = static_shape(layer.needs(0).shape)
        super().__init__(layer, signature, prod(shape), count)
        self.images, self.channels, self.pixels = shape[0], shape[1], prod(shape[2:])
        _, values, zero = get_scales(layer)
        self.packed = (make_packed_parameters(np.float32(1) / values[0], zero, *get_integer_range(layer.outputs[0].dtype)),)
        self.implementation = f"{self.channels} channels"

    def enqueue(self, args: Args, stream: Stream) -> None:
        words = (("input", 0), ("output", 0), self.images, self.pixels)
        self.launch(stream, quantize_ir(self.channels), "quantize", args, words, self.pixels, LANES)


@tactic
class QuantizeImage(CompiledTactic):
    """Exact except for ties: it computes x times the inverse of the scale instead of x / scale."""

    ops = ("QuantizeLinear",)

    def why_not(self, layer: Layer) -> str | None:
        if reason := super().why_not(layer):
            return reason
        x, zero = layer.inputs[0], layer.input(2)
        if layer.op == "Fused" or x is None or x.is_constant or x.dtype != F32 or layer.outputs[0].dtype.name not in ("i8", "u8"):
            return "quantizes f32 that is computed at run time to 8 bits, without fused operations"
        if any(t is not None and (not t.is_constant or t.type.elements != 1) for t in (layer.inputs[1], zero)) or layer.attrs["block_size"]:
            return "takes one constant scale"
        if x.type.rank < 3 or not isinstance(x.shape[1], int) or x.shape[1] not in _CHANNELS:
            return f"takes images of {', '.join(map(str, _CHANNELS))} channels"
        return None

    def signatures(self, layer: Layer, backend: Backend) -> list[Signature]:
        if self.why_not(layer) or not is_static(layer) or not format_fits("nhwc", layer.outputs[0].type.rank):
            return []
        rest = (None,) * (len(layer.inputs) - 1)
        return [Signature((Operand("linear", F32), *rest), (Operand("nhwc", layer.outputs[0].dtype),))]

    def plan(self, layer: Layer, signature: Signature, config: Config, backend: Backend) -> ImageKernel:
        return ImageKernel(layer, signature, backend.threads)


@cache
def quantize_ir(channels: int) -> str:
    """`quantize(context)` for so many channels: 16 pixels at a time, the rest of a thread's share pixel by pixel."""
    module = Module()
    with parallel_kernel(module, "quantize", _WORDS, "pixels") as (f, w):
        end_of_vectors = w.end - (LANES - 1)
        size = w.pixels * channels
        packed = w.packed.as_pointer(FLOAT)
        source, target = w.source.as_pointer(FLOAT), w.target.as_pointer(INT8)
        factor, zero, low, high = load_parameters(packed, 4)
        with f.loop(0, w.samples) as samples:
            x, y = source.at(samples.index * size), target.at(samples.index * size)

            def emit_quantized(pixel: Value, lanes: int, x: Pointer = x) -> list[Value]:
                """The integers of the pixels from `pixel` on, for each channel."""
                planes = [x.load(w.pixels * c + pixel, lanes) for c in range(channels)]
                return [to_int8(f, plane * factor.like(plane), zero, low, high) for plane in planes]

            with f.loop(w.begin, end_of_vectors, step=LANES) as vectors:
                y.store(interleave(f, emit_quantized(vectors.index, LANES)), vectors.index * channels)
            with f.loop(vectors.index, w.end) as rest:
                for c, value in enumerate(emit_quantized(rest.index, 1)):
                    y.store(value, rest.index * channels + c)
    return str(module)
