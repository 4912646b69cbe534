"""A depthwise convolution and the 1x1 convolution behind it become one layer; both stay whole in the body."""

from __future__ import annotations

from whet.network import Layer, Tensor
from whet.passes._base import Phase, Skip, rule
from whet.passes._fuse import anchored, conv_of, conv_read, fuse_whole, obstacle, plain_product, steps
from whet.passes._graph import Graph


@rule("*", phase=Phase.FINAL, after=["fuse_conv_sum"])
def fuse_depthwise_product(g: Graph, layer: Layer) -> Tensor | Skip | None:
    if anchored(layer, ("Conv",)) != "Conv":
        return None
    product = conv_of(layer)
    value = conv_read(layer, product)
    first = g.maker(value)
    if value is None or first is None or anchored(first, ("Conv",)) != "Conv" or not plain_product(product):
        return None
    head = conv_of(first)
    w = head.inputs[1]
    if w is None or w.type.rank != 4 or w.shape[1] != 1 or head.attrs["group"] != w.shape[0] or w.shape[2:] == (1, 1):
        return None
    if reason := obstacle(g, first, value, layer):
        return Skip(reason)
    if "add" in steps(first):
        return Skip(f"'{first.name}' adds something to what the product reads")
    if product.attrs["group"] != 1:
        return Skip("the second convolution has groups too")
    return fuse_whole(g, "DepthwiseProduct", first, layer)
