"""Folds a batch norm into the weights of the Conv, ConvTranspose or Gemm before it; computed in float64 and rounded once.

So too for the MatMul before a Reshape to rows (LeViT: linear(x), flatten(0, 1), then the norm of a batch of rows). A batch norm after another layer
stays: backends compute it and the activation after it in one pass over memory.
"""

from whet.network import Layer, Tensor, Weight
from whet.ops._origin import express
from whet.passes._scale import Affine, fold_into
from whet.rewrite.constants import make_scalar_weight, round_to, to_float64
from whet.rewrite.graph import Graph
from whet.rewrite.matching import find_maker_of_op
from whet.rewrite.rules import Phase, Skip, rule


@rule("BatchNormalization", phase=Phase.FOLD, level=0)
def fold_batch_norm(g: Graph, layer: Layer) -> Tensor | Skip | None:
    head = g.maker(layer.inputs[0])
    flat = head if head is not None and head.op in ("Flatten", "Reshape") else None
    product = find_maker_of_op(g, flat.inputs[0], "MatMul") if flat is not None else None
    if product is None and (head is None or head.op not in ("Conv", "ConvTranspose", "Gemm") or head.output is not layer.inputs[0]):
        return None
    statistics = [t.weight for t in layer.inputs[1:] if t is not None and t.weight is not None]
    if len(statistics) != 4:
        return Skip("its statistics are computed at run time")
    scale = batch_norm_affine(statistics, layer.attrs.get("epsilon", 1e-5))
    if product is not None and flat is not None:
        return _fold_into_product(g, product, flat, layer, scale)
    assert head is not None
    return fold_into(g, head, layer, scale)


def _fold_into_product(g: Graph, product: Layer, flat: Layer, layer: Layer, scale: Affine) -> Tensor | Skip | None:
    """The batch norm of a product's rows: factors in its weights, shifts in a sum behind it."""
    y, weights = product.output, product.inputs[1]
    if layer.output.type.rank != 2 or y.type.rank < 2 or y.shape[-1] != layer.output.shape[1] or weights is None or weights.type.rank != 2:
        return None
    if reason := g.escapes(flat.output, layer):
        return Skip(reason)
    scaled = fold_into(g, product, flat, Affine(factor=scale.factor))
    if isinstance(scaled, Skip) or scale.shift is None:
        return scaled
    shifted = g.add("Add", scaled, g.constant(round_to(scale.shift, y.dtype), f"{weights.name}.bias"), name=layer.name, sources=layer.sources)
    return g.add(flat.op, shifted, *flat.inputs[1:], name=flat.name, sources=flat.sources, **flat.attrs)


def batch_norm_affine(statistics: list[Weight], epsilon: float) -> Affine:
    """factor = scale / sqrt(variance + epsilon), shift = bias - mean * factor."""
    scale, bias, mean, variance = map(to_float64, statistics)
    factor = express("Div", scale, express("Sqrt", express("Add", variance, make_scalar_weight(epsilon))))
    return Affine(factor, express("Sub", bias, express("Mul", mean, factor)))
