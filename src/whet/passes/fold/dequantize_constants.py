"""Folds DequantizeLinear of a constant that is not a quantized weight: biases, tables, summands."""

from __future__ import annotations

from whet.network import I32, Layer, Tensor
from whet.rewrite.graph import Graph
from whet.rewrite.quantization import WEIGHTED, find_weights_obstacle, fold_constant
from whet.rewrite.rules import Phase, Skip, rule


@rule("DequantizeLinear", phase=Phase.FOLD, after=["quantize_weights", "fold_quantized_batch_norm"], level=0)
def dequantize_constants(g: Graph, layer: Layer) -> Tensor | Skip | None:
    x = layer.inputs[0]
    if x is None or x.weight is None:
        return None
    if any(t is not None and t.weight is None for t in layer.inputs[1:]):
        return Skip(f"the scale of %{x.name} is computed at run time")
    y = layer.output
    readers = g.readers(y)
    if x.dtype != I32 and not g.is_output(y) and any(r.op in WEIGHTED and r.input(1) is y for r in readers):
        reasons = [find_weights_obstacle(r.op, dict(r.attrs), layer) for r in readers if r.op in WEIGHTED]
        if None in reasons:
            return None
    return g.constant(fold_constant(layer), y.name)
