"""A depthwise convolution and the 1x1 convolution behind it become one layer; both stay whole in the body."""

from __future__ import annotations

from whet.network import Layer, Tensor
from whet.passes._base import Phase, Skip, rule
from whet.passes._fuse import before_product, conv_of, fuse_product
from whet.passes._graph import Graph


@rule("*", phase=Phase.FINAL, after=["fuse_conv_sum"])
def fuse_depthwise_then_pointwise(g: Graph, layer: Layer) -> Tensor | Skip | None:
    found = before_product(g, layer)
    if found is None:
        return None
    first, value = found
    head = conv_of(first)
    w = head.inputs[1]
    if w is None or w.type.rank != 4 or w.shape[1] != 1 or head.attrs["group"] != w.shape[0] or w.shape[2:] == (1, 1):
        return None
    return fuse_product(g, "DepthwiseThenPointwise", first, value, layer)
