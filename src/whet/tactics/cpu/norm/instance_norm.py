"""InstanceNormalization and GroupNormalization with constant scale and bias, in f32. Older exports write the groups of a GroupNorm as channels.

For coverage: otherwise NumPy computes it.
"""

from __future__ import annotations

from math import prod

import numpy as np

from whet.backends import Backend
from whet.network import F32, Layer, static_shape
from whet.tactics._base import Args, Config, Operand, Packed, Signature, Stream, tactic
from whet.tactics.cpu._llvm.builder import LANES
from whet.tactics.cpu._llvm.kernel import CompiledKernel, CompiledTactic
from whet.tactics.cpu.norm._instance_norm_ir import emit_instance_norm_ir
from whet.tactics.cpu.onednn._kernel import is_static


class InstanceNormKernel(CompiledKernel):
    """A planned launch; its packed operand is described in _instance_norm_ir.py."""

    serial_work = 1 << 14  # elements
    rtol, implementation = 1e-5, "rows"

    def __init__(self, layer: Layer, signature: Signature, count: int) -> None:
        batch, channels, *spatial = static_shape(layer.outputs[0].shape)
        self.groups = layer.attrs.get("num_groups", channels)
        self.rows, self.width, self.group = batch * self.groups, prod(spatial), channels // self.groups
        self.length = self.width * self.group
        super().__init__(layer, signature, self.rows * self.length, count)
        epsilon, length = float(layer.attrs["epsilon"]), self.length
        scale, bias = layer.needs(1), layer.needs(2)

        def pack() -> np.ndarray:
            values = np.zeros(LANES + 2 * channels, np.float32)
            values[:2] = epsilon, 1 / length
            values[LANES:] = np.concatenate([scale.array().reshape(-1), bias.array().reshape(-1)])
            return values.view(np.uint8)

        key = f"{scale.constant().digest}|{bias.constant().digest}|instance norm {length} {epsilon!r}"
        self.packed = (Packed(key, 4 * (LANES + 2 * channels), pack),)

    def enqueue(self, args: Args, stream: Stream) -> None:
        words: list[tuple[str, int] | int] = [("input", 0), ("output", 0), self.rows, self.width, self.group, self.groups]
        self.launch(stream, emit_instance_norm_ir(self.length % LANES, self.width % LANES), "instance_norm", args, words, self.rows)


@tactic
class InstanceNorm(CompiledTactic):
    ops = ("GroupNormalization", "InstanceNormalization")

    def why_not(self, layer: Layer) -> str | None:
        if reason := super().why_not(layer):
            return reason
        if layer.op == "Fused":
            return "takes single layers, not fused ones"
        if any(layer.needs(i).dtype != F32 for i in range(3)):
            return "computes in f32"
        if layer.needs(0).is_constant or not layer.needs(1).is_constant or not layer.needs(2).is_constant:
            return "scale or bias is computed at run time, or the input is constant"
        return None

    def signatures(self, layer: Layer, backend: Backend) -> list[Signature]:
        if self.why_not(layer) or not is_static(layer):
            return []
        row_major = Operand("linear", F32)
        return [Signature((row_major, None, None), (row_major,), ((0, 0),)), Signature((row_major, None, None), (row_major,))]

    def plan(self, layer: Layer, signature: Signature, config: Config, backend: Backend) -> InstanceNormKernel:
        return InstanceNormKernel(layer, signature, backend.threads)
