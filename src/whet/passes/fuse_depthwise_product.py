"""A depthwise convolution and the 1x1 convolution behind it become one layer; both stay whole in the body."""

from __future__ import annotations

from whet.network import Layer, Tensor
from whet.passes._base import Phase, Skip, rule
from whet.passes._fuse import anchored, fuse_whole, obstacle, steps
from whet.passes._graph import Graph


@rule("*", phase=Phase.FINAL, after=["fuse_conv_sum"])
def fuse_depthwise_product(g: Graph, layer: Layer) -> Tensor | Skip | None:
    if anchored(layer, ("Conv",)) != "Conv":
        return None
    product = _conv(layer)
    value = _read(layer, product)
    first = g.maker(value)
    if value is None or first is None or anchored(first, ("Conv",)) != "Conv" or not _small(product):
        return None
    head = _conv(first)
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


def _conv(layer: Layer) -> Layer:
    return layer if layer.op == "Conv" else next(x for x in layer.regions["body"].layers if x.op == "Conv")


def _read(layer: Layer, conv: Layer) -> Tensor | None:
    """What the convolution of a layer reads, as the network knows it."""
    if layer is conv:
        return conv.inputs[0]
    body = layer.regions["body"]
    return dict(zip(body.inputs, layer.inputs, strict=True)).get(conv.inputs[0])


def _small(conv: Layer) -> bool:
    """1x1, stride 1, no padding."""
    w, a = conv.inputs[1], conv.attrs
    return w is not None and w.type.rank == 4 and w.shape[2:] == (1, 1) and set(a.get("strides") or (1,)) == {1} and not any(a.get("pads") or ())
