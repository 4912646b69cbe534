"""Scores of attention to which a bias is added before they are scaled, or from which a mask is subtracted: the scaled scores plus a mask.

XLNet adds the scores of relative positions first, scales the sum, and subtracts a mask. Kernels of attention scale a product, then add one mask.
"""

from __future__ import annotations

from whet.network import Layer, Tensor
from whet.passes._scores import are_scores, only_feeds_softmax, split_scores
from whet.rewrite.constants import scalar_value
from whet.rewrite.graph import Graph
from whet.rewrite.matching import find_maker_of_op
from whet.rewrite.rules import Phase, Skip, rule


@rule("Mul", "Div", "Sub", phase=Phase.CLEAN, after=["masked_fill_to_add", "unreshape_masks"], level=2)
def scale_masks(g: Graph, layer: Layer) -> Tensor | Skip | None:
    if not only_feeds_softmax(g, layer.output):
        return None
    if layer.op == "Sub":
        scores, mask = layer.inputs
        if scores is None or mask is None or scores.type != layer.output.type or not are_scores(g, scores) or are_scores(g, mask):
            return None
        return g.add("Add", scores, g.add("Neg", mask))
    for t, factor in (layer.inputs, layer.inputs[::-1]) if layer.op == "Mul" else (layer.inputs,):
        add = find_maker_of_op(g, t, "Add")
        parts = split_scores(g, add) if add is not None else None
        if add is None or parts is None or scalar_value(factor) is None or layer.output.type != add.output.type:
            continue
        if reason := g.escapes(add.output, layer):
            return Skip(reason)
        return g.add("Add", *(g.add(layer.op, part, factor) for part in parts))
    return None
