"""Folds QuantizeLinear of a constant."""

from __future__ import annotations

from whet.network import Layer, Tensor
from whet.rewrite.graph import Graph
from whet.rewrite.quantization import fold_constant
from whet.rewrite.rules import Phase, Skip, rule


@rule("QuantizeLinear", phase=Phase.FOLD, level=0)
def quantize_weights(g: Graph, layer: Layer) -> Tensor | Skip | None:
    x = layer.inputs[0]
    if x is None or x.weight is None:
        return None
    if any(t is not None and t.weight is None for t in layer.inputs[1:]):
        return Skip(f"the scale of %{x.name} is computed at run time")
    return g.constant(fold_constant(layer), layer.output.name)
