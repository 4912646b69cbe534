"""A factor per head of attention's scores scales the queries instead: they have far fewer values.

Cosine attention (Swin V2) and cross-covariance attention (XCiT) have a learned temperature per head. Kernels of attention take one scale for all
heads.
"""

from __future__ import annotations

from whet.network import Layer, Tensor
from whet.passes._scores import only_feeds_softmax
from whet.rewrite.constants import scalar_value
from whet.rewrite.graph import Graph
from whet.rewrite.matching import find_maker_of_op
from whet.rewrite.rules import Phase, Skip, rule


@rule("Mul", "Div", phase=Phase.CLEAN, after=["fold_constants", "fold_shapes"], level=2)
def scale_queries(g: Graph, layer: Layer) -> Tensor | Skip | None:
    for scores, factor in (layer.inputs, layer.inputs[::-1]) if layer.op == "Mul" else (layer.inputs,):
        product = find_maker_of_op(g, scores, "MatMul")
        if product is None or scores is None or factor is None or scalar_value(factor) is not None or not only_feeds_softmax(g, layer.output):
            continue
        q, k = product.inputs
        dims = (1,) * max(scores.type.rank - factor.type.rank, 0) + tuple(factor.shape)
        if q is None or k is None or q.is_constant or k.is_constant or scores.type != layer.output.type or dims[-2:] != (1, 1):
            continue
        if q.type.rank != scores.type.rank or any(d not in (1, n) for d, n in zip(dims, q.shape, strict=True)):
            return Skip(f"the queries %{q.name}: {q.type} lack an axis of the factor %{factor.name}: {factor.type}")
        if reason := g.escapes(scores, layer):
            return Skip(reason)
        return g.add("MatMul", g.add(layer.op, q, factor, name=f"{layer.name}_queries", sources=layer.sources), k)
    return None
