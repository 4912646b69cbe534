"""Dequantizes constant weights at build time where their layer computes in floating point after all."""

from __future__ import annotations

from whet.network import Layer, Tensor
from whet.rewrite.graph import Graph
from whet.rewrite.quantization import fold_constant
from whet.rewrite.rules import Phase, rule


@rule("DequantizeLinear", phase=Phase.FINAL, after=["fuse_dequantized"], level=0)
def dequantize_weights(g: Graph, layer: Layer) -> Tensor | None:
    if any(t is not None and t.weight is None for t in layer.inputs):
        return None
    return g.constant(fold_constant(layer), layer.output.name)
