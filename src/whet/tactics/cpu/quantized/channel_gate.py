"""Channel-wise scaling of 8-bit images (nhwc) by a float for each channel of each sample, with an 8-bit result, in one pass.

The last step of squeeze-and-excitation. oneDNN's binary primitive uses scalar loops for batches of more than one.

Measured: docs/notes/cpu_kernels.md, seven times as fast as oneDNN.
"""

from __future__ import annotations

from functools import cache
from math import prod

import numpy as np

from whet.backends import Backend
from whet.network import F32, Layer, format_fits, static_shape
from whet.tactics._base import Args, Config, Operand, Signature, Stream, tactic
from whet.tactics._quantized import Parts, require_quantized
from whet.tactics.cpu._llvm.builder import FLOAT, INT8, INT32, LANES, Module, Value
from whet.tactics.cpu._llvm.kernel import (
    LAST_WORDS,
    CompiledKernel,
    CompiledTactic,
    get_integer_range,
    load_parameters,
    make_packed_parameters,
    to_int8,
)
from whet.tactics.cpu._llvm.work_stealing import parallel_kernel
from whet.tactics.cpu.onednn._kernel import is_static
from whet.tactics.cpu.onednn._quantized import QuantizedTactic, drop_implied_bounds
from whet.tactics.cpu.onednn.onednn_qmul import find_integer_and_factor, require_integer_and_factor

_WORDS = ("source", "factors", "target", "samples", "channels", "pixels", *LAST_WORDS)


class GateKernel(CompiledKernel):
    """A planned gate; its packed operand holds the scales' quotient, both zero points and the integers' bounds."""

    serial_work = 1 << 13  # elements

    implementation = "pixels"

    def __init__(self, layer: Layer, signature: Signature, parts: Parts, count: int) -> None:
        shape = static_shape(layer.outputs[0].shape)
        super().__init__(layer, signature, prod(shape), count)
        self.x, self.factor = require_integer_and_factor(parts)
        self.images, self.channels, self.pixels = shape[0], shape[1], prod(shape[2:])
        reads, stores = parts.reads[self.x], parts.result
        scale = float(np.float32(reads.number) / np.float32(stores.number))
        self.packed = (make_packed_parameters(scale, reads.zero, stores.zero, *get_integer_range(stores.dtype)),)
        self.signed = reads.dtype.name == "i8"

    def enqueue(self, args: Args, stream: Stream) -> None:
        operands = (("input", self.x), ("input", self.factor), ("output", 0))
        self.launch(stream, emit_gate_ir(self.signed), "gate", args, (*operands, self.images, self.channels, self.pixels), self.pixels)


@tactic
class Gate(QuantizedTactic, CompiledTactic):
    ops = ("Mul",)

    def why_not_parts(self, parts: Parts) -> str | None:
        indices = find_integer_and_factor(parts)
        if parts.stores is None or indices is None or drop_implied_bounds(parts):
            return "multiplies an integer tensor by a float factor and stores integers"
        x, factor = (parts.view.needs(i) for i in indices)
        if x.is_constant or factor.is_constant or x.shape != parts.view.outputs[0].shape or x.type.rank < 3:
            return "takes an integer image of the output's shape, and both operands computed at run time"
        if tuple(factor.shape) != (*x.shape[:2], *(1,) * (x.type.rank - 2)):
            return "takes one factor for each channel of each sample"
        return None

    def signatures(self, layer: Layer, backend: Backend) -> list[Signature]:
        if self.why_not(layer) or not is_static(layer) or not format_fits("nhwc", layer.outputs[0].type.rank):
            return []
        parts = require_quantized(layer)
        x, factor = require_integer_and_factor(parts)
        stored = {x: Operand("nhwc", parts.reads[x].dtype), factor: Operand("nhwc", F32)}
        inputs, out = tuple(stored.get(i) for i in range(len(layer.inputs))), (Operand("nhwc", parts.result.dtype),)
        return [Signature(inputs, out, ((x, 0),)), Signature(inputs, out)]

    def plan(self, layer: Layer, signature: Signature, config: Config, backend: Backend) -> GateKernel:
        return GateKernel(layer, signature, require_quantized(layer), backend.threads)


@cache
def emit_gate_ir(signed: bool) -> str:
    """`gate(context)`: for each pixel of a thread's share 16 channels at a time, then one by one."""
    module = Module()
    with parallel_kernel(module, "gate", _WORDS, "pixels") as (f, w):
        end_of_vectors = w.channels - (LANES - 1)
        size = w.pixels * w.channels
        packed = w.packed.as_pointer(FLOAT)
        source, target = w.source.as_pointer(INT8), w.target.as_pointer(INT8)
        factors = w.factors.as_pointer(FLOAT)
        scale, zero_point, zero, low, high = load_parameters(packed, 5)

        def emit_gated(integers: Value, factor: Value) -> Value:
            real = integers.convert("sext" if signed else "zext", INT32).convert("sitofp", FLOAT) - zero_point.like(factor)
            return to_int8(f, real * (factor * scale.like(factor)), zero, low, high)

        with f.loop(0, w.samples) as samples:
            x_sample, y_sample = source.at(samples.index * size), target.at(samples.index * size)
            factor = factors.at(samples.index * w.channels)
            with f.loop(w.begin, w.end) as pixels:
                offset = pixels.index * w.channels
                x, y = x_sample.at(offset), y_sample.at(offset)
                with f.loop(0, end_of_vectors, step=LANES) as vectors:
                    c = vectors.index
                    y.store(emit_gated(x.load_vector(c), factor.load_vector(c)), c)
                with f.loop(vectors.index, w.channels) as rest:
                    c = rest.index
                    y.store(emit_gated(x.load(c), factor.load(c)), c)
    return str(module)
