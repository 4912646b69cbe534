"""Moves with arithmetic between them and the 1x1 convolutions in front, as detectors' heads end, become one layer; all stay whole in the body."""

from __future__ import annotations

from whet.network import Layer, Tensor
from whet.passes._base import Phase, Skip, rule
from whet.passes._fuse import anchored, conv_of, fuse_whole, obstacle, plain_product, steps
from whet.passes._graph import Graph
from whet.passes.fuse_moves import HINT


@rule("Fused", phase=Phase.FINAL, after=["pad_moved_channels"])
def fuse_heads(g: Graph, layer: Layer) -> Tensor | Skip | None:
    if layer.hint != HINT:
        return None
    convs: list[Layer] = []
    for t in dict.fromkeys(t for t in layer.inputs if t is not None and not t.is_constant):
        maker = g.maker(t)
        if maker is None or anchored(maker, ("Conv",)) != "Conv" or not plain_product(conv_of(maker)) or conv_of(maker).attrs["group"] != 1:
            return None
        if {"add", "activation"} & set(steps(maker)) or any(x.op == "DequantizeLinear" for r in maker.regions.values() for x in r.layers):
            return None
        if reason := obstacle(g, maker, t, layer):
            return Skip(reason)
        convs.append(maker)
    return fuse_whole(g, "Heads", *sorted(convs, key=g.place), layer) if convs else None
