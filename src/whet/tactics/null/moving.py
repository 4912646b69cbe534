"""Null pooling, activations and sums: limited by memory bandwidth, in any format that all operands support."""

from __future__ import annotations

from whet.network import FORMATS, Layer
from whet.ops import get_op
from whet.tactics._base import Config, Signature, Tactic, tactic
from whet.tactics.null._cost import NullKernel, find_uniform_signature

_POOLS = ("MaxPool", "AveragePool", "GlobalAveragePool", "GlobalMaxPool")


@tactic
class NullMoving(Tactic):
    ops = ("*",)

    def why_not(self, layer: Layer) -> str | None:
        if layer.op in _POOLS or (layer.op != "Fused" and get_op(layer.op).pointwise):
            return None
        return "computes poolings and elementwise ops"

    def signatures(self, layer: Layer, backend) -> list[Signature]:
        return [s for f in FORMATS if (s := find_uniform_signature(layer, f)) is not None]

    def refuses(self, layer: Layer, signature: Signature, backend) -> str | None:
        formats = {o.format for o in (*signature.inputs, *signature.outputs) if o is not None}
        if formats == {"linear"}:
            return None
        y = layer.outputs[0].type
        if len(formats) > 1 or (layer.op not in _POOLS and any(t is not None and t.shape != y.shape for t in layer.inputs)):
            return "operands broadcast, which only row-major ones can"
        return None

    def plan(self, layer: Layer, signature: Signature, config: Config, backend) -> NullKernel:
        return NullKernel(layer, signature, f"null_moving_{signature.outputs[0].format}")
