"""Folds a batch norm into the weights of the Conv, ConvTranspose or Gemm before it; computed in float64 and rounded once.

A batch norm after another layer stays: backends compute it and the activation after it in one pass over memory.
"""

from whet.network import Layer, Tensor, Weight
from whet.ops._origin import express
from whet.passes._scale import Affine, fold_into
from whet.rewrite.constants import scalar_weight, to_float64
from whet.rewrite.graph import Graph
from whet.rewrite.rules import Phase, Skip, rule


@rule("BatchNormalization", phase=Phase.FOLD, level=0)
def fold_batch_norm(g: Graph, layer: Layer) -> Tensor | Skip | None:
    head = g.maker(layer.inputs[0])
    if head is None or head.op not in ("Conv", "ConvTranspose", "Gemm") or head.output is not layer.inputs[0]:
        return None
    statistics = [t.weight for t in layer.inputs[1:] if t is not None and t.weight is not None]
    if len(statistics) != 4:
        return Skip("its statistics are computed at run time")
    return fold_into(g, head, layer, affine(statistics, layer.attrs.get("epsilon", 1e-5)))


def affine(statistics: list[Weight], epsilon: float) -> Affine:
    """factor = scale / sqrt(variance + epsilon), shift = bias - mean * factor."""
    scale, bias, mean, variance = map(to_float64, statistics)
    factor = express("Div", scale, express("Sqrt", express("Add", variance, scalar_weight(epsilon))))
    return Affine(factor, express("Sub", bias, express("Mul", mean, factor)))
