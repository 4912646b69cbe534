"""Two values added to scores of attention, a position bias and a mask, are added to each other first.

Kernels of attention add one mask, and none if all its values are 0. Constants are added once, when the engine is built, and a sum that
several layers use is computed once.
"""

from __future__ import annotations

from whet.network import Layer, Tensor
from whet.ops._origin import express
from whet.passes._scores import only_feeds_softmax, split_scores
from whet.rewrite.graph import Graph
from whet.rewrite.matching import find_maker_of_op
from whet.rewrite.rules import Phase, Skip, rule

_MOST_BYTES = 1 << 24  # of a sum of constants


@rule("Add", phase=Phase.CLEAN, after=["masked_fill_to_add", "unreshape_masks"], level=2)
def merge_masks(g: Graph, layer: Layer) -> Tensor | Skip | None:
    outer = split_scores(g, layer)
    if outer is not None and outer[1].weight is not None and not outer[1].weight.array.any() and only_feeds_softmax(g, layer.output):
        return outer[0]
    inner_add = find_maker_of_op(g, outer[0], "Add") if outer is not None else None
    inner = split_scores(g, inner_add) if inner_add is not None else None
    if outer is None or inner is None or inner_add is None or not only_feeds_softmax(g, layer.output):
        return None
    if reason := g.escapes(inner_add.output, layer):
        return Skip(reason)
    scores, (bias, mask) = inner[0], (inner[1], outer[1])
    if scores.dtype.bits < 32:
        return Skip(f"the sum of %{bias.name} and %{mask.name} might overflow {scores.dtype}")
    for a, b in ((bias, mask), (mask, bias)):
        tile = find_maker_of_op(g, a, "Tile")
        if tile is not None and tile.inputs[0] is not None and (b.type.rank < a.type.rank or b.shape[0] == 1):
            repeats = tile.attrs.get("repeats")
            if repeats is not None and all(r == 1 for r in repeats[1:]):
                return g.add("Add", scores, g.add("Tile", _sum(g, tile.inputs[0], b), repeats=repeats))
    return g.add("Add", scores, _sum(g, bias, mask))


def _sum(g: Graph, a: Tensor, b: Tensor) -> Tensor:
    total: Tensor = g.add("Add", a, b)
    if a.weight is None or b.weight is None or not isinstance(total.type.nbytes, int) or total.type.nbytes > _MOST_BYTES:
        return total
    return g.constant(express("Add", a.weight, b.weight), "mask")
