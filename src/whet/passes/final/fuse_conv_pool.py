"""A network's first convolution and the max pooling behind it become one layer; the convolution stays whole in the body."""

from __future__ import annotations

from whet.network import Layer, Tensor
from whet.passes._base import Phase, Skip, rule
from whet.passes._fuse import anchored, fuse_whole, obstacle
from whet.passes._graph import Graph

_FEW = 4  # input channels: with more, a result that two windows share costs more to make twice than to store


@rule("MaxPool", phase=Phase.FINAL)
def fuse_conv_pool(g: Graph, layer: Layer) -> Tensor | Skip | None:
    value = layer.inputs[0]
    head = g.maker(value)
    if value is None or head is None or anchored(head, ("Conv",)) != "Conv" or len(layer.outputs) != 1 or value.type.rank != 4:
        return None
    conv = head if head.op == "Conv" else next(x for x in head.regions["body"].layers if x.op == "Conv")
    x = conv.inputs[0]
    if x is None or not isinstance(x.shape[1], int) or x.shape[1] > _FEW:
        return None
    if reason := obstacle(g, head, value, layer):
        return Skip(reason)
    return fuse_whole(g, "ConvPool", head, layer)
