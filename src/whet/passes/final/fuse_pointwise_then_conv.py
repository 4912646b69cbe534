"""A 1x1 convolution and the convolution of several taps that alone reads it become one layer, where channels are few; both stay whole in the body."""

from __future__ import annotations

from whet.network import Layer, Tensor
from whet.passes._base import Phase, Skip, rule
from whet.passes._fuse import anchored, conv_of, conv_read, fuse_whole, obstacle, plain_product, steps
from whet.passes._graph import Graph

_MOST = 64  # channels between the two: with more, multiplying the pixels at the edges of tiles twice costs more than a launch


@rule("*", phase=Phase.FINAL, after=["fuse_conv_then_pointwise"])
def fuse_pointwise_then_conv(g: Graph, layer: Layer) -> Tensor | Skip | None:
    if anchored(layer, ("Conv",)) != "Conv" or layer.composite == "PointwiseThenConv":
        return None
    head = conv_of(layer)
    w, a = head.inputs[1], head.attrs
    if w is None or w.type.rank != 4 or w.shape[2:] == (1, 1) or a["group"] != 1 or set(a.get("dilations") or (1,)) != {1}:
        return None
    value = conv_read(layer, head)
    first = g.maker(value)
    if value is None or first is None or anchored(first, ("Conv",)) != "Conv" or not plain_product(conv_of(first)):
        return None
    front = conv_of(first).inputs[1]
    if front is None or front.shape[0] != front.shape[1] or not isinstance(front.shape[0], int) or front.shape[0] > _MOST:
        return None
    if reason := obstacle(g, first, value, layer):
        return Skip(reason)
    if "add" in steps(first):
        return Skip(f"'{first.name}' adds something to what the convolution reads")
    return fuse_whole(g, "PointwiseThenConv", first, layer)
