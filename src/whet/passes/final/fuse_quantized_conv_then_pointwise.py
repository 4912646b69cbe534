"""A quantized convolution of several taps and the quantized 1x1 convolution behind it become one layer; both stay whole in the body."""

from __future__ import annotations

from whet.network import I8, U8, Layer, Tensor
from whet.passes._base import Phase, Skip, rule
from whet.passes._fuse import anchored, conv_of, fuse_whole, plain_product, steps
from whet.passes._graph import Graph


@rule("*", phase=Phase.FINAL, after=["fuse_conv_then_pointwise", "fuse_quantized_pool", "fuse_quantized_sum"])
def fuse_quantized_conv_then_pointwise(g: Graph, layer: Layer) -> Tensor | Skip | None:
    value = _integers(layer)
    first = g.maker(value)
    if value is None or first is None or _integers(first) is None or not plain_product(conv_of(layer)):
        return None
    head = conv_of(first)
    w, a = head.inputs[1], head.attrs
    if value.dtype not in (I8, U8) or w is None or w.type.rank != 4 or w.shape[2:] == (1, 1):
        return None
    if {*(a.get("strides") or (1,)), *(a.get("dilations") or (1,))} != {1} or a["group"] != 1 or conv_of(layer).attrs["group"] != 1:
        return None
    if "add" in steps(first):
        return Skip(f"'{first.name}' adds something to what the product reads")
    if reason := g.shared(value, layer):
        return Skip(reason)
    return fuse_whole(g, "ConvThenPointwise", first, layer)


def _integers(layer: Layer) -> Tensor | None:
    """The integers that a quantized convolution reads; None for another layer."""
    if layer.op != "Fused" or anchored(layer, ("Conv",)) != "Conv":
        return None
    read = conv_of(layer).inputs[0]
    dequantizes = None if read is None else read.maker
    if dequantizes is None or dequantizes.op != "DequantizeLinear":
        return None
    body = layer.regions["body"]
    return dict(zip(body.inputs, layer.inputs, strict=True)).get(dequantizes.inputs[0])
