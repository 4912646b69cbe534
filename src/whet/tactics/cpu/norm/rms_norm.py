"""RMSNormalization with a constant scale, in f32: one compiled pass over each row for the sum of squares and one for the result.

For coverage: otherwise NumPy computes it.
"""

from __future__ import annotations

from math import prod

import numpy as np

from whet.backends import Backend
from whet.network import F32, DType, Layer, static_shape
from whet.tactics._base import Args, Config, Operand, Packed, PlanRefused, Signature, Stream, tactic
from whet.tactics.cpu._llvm.builder import LANES
from whet.tactics.cpu._llvm.kernel import CompiledKernel, CompiledTactic
from whet.tactics.cpu._llvm.packing import RTOL
from whet.tactics.cpu.norm._row_norm_ir import emit_row_norm_ir
from whet.tactics.cpu.onednn._kernel import is_static


class RowNormKernel(CompiledKernel):
    """A planned launch; its packed operand is described in _row_norm_ir.py."""

    serial_work = 1 << 14  # elements
    implementation = "rows"

    def __init__(self, layer: Layer, signature: Signature, count: int) -> None:
        shape = static_shape(layer.outputs[0].shape)
        axis = layer.attrs["axis"] % len(shape)
        self.rows, self.width = prod(shape[:axis]), prod(shape[axis:])
        super().__init__(layer, signature, self.rows * self.width, count)
        self.layer_op, self.stored = layer.op, signature.outputs[0].dtype
        self.rtol = RTOL[self.stored]
        epsilon, width, constants = float(layer.attrs["epsilon"]), self.width, (layer.input(1), layer.input(2))

        def pack() -> np.ndarray:
            numbers = np.zeros((2, width), np.float32)
            numbers[0] = 1
            for line, t in zip(numbers, constants, strict=True):
                if t is not None:
                    line[:] = np.broadcast_to(t.array(), shape[axis:]).reshape(-1)
            parameters = np.zeros(LANES, np.float32)
            parameters[:2] = epsilon, 1 / width
            return np.concatenate([parameters, numbers.reshape(-1)]).view(np.uint8)

        digests = "|".join("" if t is None else t.constant().digest for t in constants)
        self.packed = (Packed(f"{digests}|row norm {shape[axis:]} {epsilon!r}", 4 * (LANES + 2 * width), pack),)

    def enqueue(self, args: Args, stream: Stream) -> None:
        words: list[tuple[str, int] | int] = [("input", 0), ("output", 0), self.rows, self.width]
        ir = emit_row_norm_ir(self.width % LANES, self.layer_op == "LayerNormalization", self.stored)
        self.launch(stream, ir, "row_norm", args, words, self.rows)


@tactic
class RmsNorm(CompiledTactic):
    ops = ("RMSNormalization",)
    stored: DType = F32

    def why_not(self, layer: Layer) -> str | None:
        if reason := super().why_not(layer):
            return reason
        if layer.op == "Fused":
            return "takes single layers, not fused ones"
        if layer.needs(0).dtype != F32:
            return "computes in f32"
        if layer.needs(0).is_constant or any(t is not None and not t.is_constant for t in layer.inputs[1:]):
            return "scale or bias is computed at run time, or the input is constant"
        return None

    def signatures(self, layer: Layer, backend: Backend) -> list[Signature]:
        if self.why_not(layer) or not is_static(layer) or 0 in static_shape(layer.outputs[0].shape):
            return []
        rest = (None,) * (len(layer.inputs) - 1)
        return [Signature((Operand("linear", self.stored), *rest), (Operand("linear", self.stored),))]

    def plan(self, layer: Layer, signature: Signature, config: Config, backend: Backend) -> RowNormKernel:
        if reason := self.why_not(layer):
            raise PlanRefused(reason)
        return RowNormKernel(layer, signature, backend.threads)
