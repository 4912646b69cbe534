"""Null views: reshapes in place, at no cost."""

from __future__ import annotations

from whet.network import Layer
from whet.tactics._base import Config, Operand, Signature, Tactic, tactic
from whet.tactics.null._cost import NullKernel


@tactic
class NullView(Tactic):
    ops = ("Reshape", "Flatten", "Squeeze", "Unsqueeze", "Identity")

    def signatures(self, layer: Layer, backend) -> list[Signature]:
        if layer.op not in self.ops or layer.inputs[0] is None or layer.inputs[0].is_constant:
            return []
        ins = tuple(None if t is None or t.is_constant else Operand("linear", t.dtype) for t in layer.inputs)
        return [Signature(ins, (Operand("linear", layer.output.dtype),), ((0, 0),))]

    def plan(self, layer: Layer, signature: Signature, config: Config, backend) -> NullKernel:
        return NullKernel(layer, signature, "null_view", slow=0.0)
