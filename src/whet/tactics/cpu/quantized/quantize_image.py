"""Quantizes an image of two to four channels from f32 planes to interleaved 8-bit channels in one pass.

Networks of images begin with it. oneDNN's reorder uses a scalar loop; this kernel processes 16 pixels of all channels at once.

Measured: docs/notes/cpu_kernels.md, five times as fast as oneDNN.
"""

from __future__ import annotations

from functools import cache

import numpy as np

from whet.backends import Backend
from whet.network import F32, Layer, format_fits
from whet.tactics._base import Args, Config, Operand, Signature, Stream, tactic
from whet.tactics.cpu._llvm.builder import INT8, Function, Pointer
from whet.tactics.cpu._llvm.image import Convert, ImageKernel, emit_image_ir, why_not_image
from whet.tactics.cpu._llvm.kernel import CompiledTactic, get_integer_range, load_parameters, make_packed_parameters, to_int8
from whet.tactics.cpu.onednn._kernel import is_static
from whet.tactics.cpu.onednn.onednn_quantize import get_scales


class QuantizeKernel(ImageKernel):
    """A planned quantization; its packed operand holds factor, zero point and the integers' bounds."""

    serial_work = 1 << 13  # elements

    def __init__(self, layer: Layer, signature: Signature, count: int) -> None:
        super().__init__(layer, signature, count)
        _, values, zero = get_scales(layer)
        self.packed = (make_packed_parameters(np.float32(1) / values[0], zero, *get_integer_range(layer.outputs[0].dtype)),)

    def enqueue(self, args: Args, stream: Stream) -> None:
        self.launch_pixels(stream, emit_quantize_ir(self.channels), "quantize", args)


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
        return why_not_image(x)

    def signatures(self, layer: Layer, backend: Backend) -> list[Signature]:
        if self.why_not(layer) or not is_static(layer) or not format_fits("nhwc", layer.outputs[0].type.rank):
            return []
        rest = (None,) * (len(layer.inputs) - 1)
        return [Signature((Operand("linear", F32), *rest), (Operand("nhwc", layer.outputs[0].dtype),))]

    def plan(self, layer: Layer, signature: Signature, config: Config, backend: Backend) -> QuantizeKernel:
        return QuantizeKernel(layer, signature, backend.threads)


@cache
def emit_quantize_ir(channels: int) -> str:
    """`quantize(context)` for so many channels."""

    def load_conversion(f: Function, packed: Pointer) -> Convert:
        factor, zero, low, high = load_parameters(packed, 4)
        return lambda f, x: to_int8(f, x * factor.like(x), zero, low, high)

    return emit_image_ir("quantize", channels, INT8, load_conversion)
