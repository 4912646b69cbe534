"""A convolution of several taps and the 1x1 convolution behind it become one layer; both stay whole in the body."""

from __future__ import annotations

from whet.network import Layer, Tensor
from whet.passes._base import Phase, Skip, rule
from whet.passes._fuse import before_product, conv_of, fuse_product
from whet.passes._graph import Graph


@rule("*", phase=Phase.FINAL, after=["fuse_conv_sum", "fuse_depthwise_then_pointwise"])
def fuse_conv_then_pointwise(g: Graph, layer: Layer) -> Tensor | Skip | None:
    found = before_product(g, layer)
    if found is None:
        return None
    first, value = found
    head = conv_of(first)
    w, a = head.inputs[1], head.attrs
    if w is None or w.type.rank != 4 or w.shape[2:] == (1, 1) or {*(a.get("strides") or (1,)), *(a.get("dilations") or (1,))} != {1}:
        return None
    if a["group"] != 1:
        return None
    return fuse_product(g, "ConvThenPointwise", first, value, layer)
