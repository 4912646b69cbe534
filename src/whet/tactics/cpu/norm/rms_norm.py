"""RMSNormalization with a constant scale, in f32: one compiled pass over each row for the sum of squares and one for the result.

For coverage: otherwise NumPy computes it.
"""

from __future__ import annotations

from math import prod

import numpy as np

from whet.backends import Backend
from whet.network import F32, Layer, static_shape
from whet.tactics._base import Args, Config, Operand, Packed, PlanRefused, Signature, Stream, tactic
from whet.tactics.cpu._llvm.builder import LANES
from whet.tactics.cpu._llvm.kernel import CompiledKernel, CompiledTactic
from whet.tactics.cpu.norm._rms_norm_ir import rms_norm_ir
from whet.tactics.cpu.onednn._kernel import static


class RmsNormKernel(CompiledKernel):
    """A planned launch; its packed operand is described in _rms_norm_ir.py."""

    serial_work = 1 << 14  # elements
    rtol, implementation = 1e-5, "rows"

    def __init__(self, layer: Layer, signature: Signature, count: int) -> None:
        shape = static_shape(layer.outputs[0].shape)
        axis = layer.attrs["axis"] % len(shape)
        self.rows, self.width = prod(shape[:axis]), prod(shape[axis:])
        super().__init__(layer, signature, self.rows * self.width, count)
        epsilon, width, scale = float(layer.attrs["epsilon"]), self.width, layer.needs(1)

        def pack() -> np.ndarray:
            numbers = np.zeros(LANES + width, np.float32)
            numbers[:2] = epsilon, 1 / width
            numbers[LANES:] = np.broadcast_to(scale.array(), shape[axis:]).reshape(-1)
            return numbers.view(np.uint8)

        self.packed = (Packed(f"{scale.constant().digest}|rms norm {shape[axis:]} {epsilon!r}", 4 * (LANES + width), pack),)

    def enqueue(self, args: Args, stream: Stream) -> None:
        words: list[tuple[str, int] | int] = [("input", 0), ("output", 0), self.rows, self.width]
        self.launch(stream, rms_norm_ir(self.width % LANES), "rms_norm", args, words, self.rows)


@tactic
class RmsNorm(CompiledTactic):
    ops = ("RMSNormalization",)

    def why_not(self, layer: Layer) -> str | None:
        if said := super().why_not(layer):
            return said
        if layer.op != "RMSNormalization":
            return "takes single layers, not fused ones"
        if layer.needs(0).dtype != F32:
            return "computes in f32"
        if layer.needs(0).is_constant or not layer.needs(1).is_constant:
            return "scale is computed at run time, or the input is constant"
        return None

    def signatures(self, layer: Layer, backend: Backend) -> list[Signature]:
        if self.why_not(layer) or not static(layer) or 0 in static_shape(layer.outputs[0].shape):
            return []
        return [Signature((Operand("linear", F32), None), (Operand("linear", F32),))]

    def plan(self, layer: Layer, signature: Signature, config: Config, backend: Backend) -> RmsNormKernel:
        if said := self.why_not(layer):
            raise PlanRefused(said)
        return RmsNormKernel(layer, signature, backend.threads)
