"""A network's first convolution on 8-bit integers, the max pooling behind it and the quantization of the image in front become one layer."""

from __future__ import annotations

from whet.network import I8, U8, Layer, Tensor
from whet.passes._base import Phase, Skip, rule
from whet.passes._fuse import anchored, fuse_whole
from whet.passes._graph import Graph
from whet.passes._quantize import scales_of

_FEW = 4  # input channels: with more, a result that two windows share costs more to make twice than to store


@rule("MaxPool", phase=Phase.FINAL, after=["fuse_conv_pool"])
def fuse_quantized_pool(g: Graph, layer: Layer) -> Tensor | Skip | None:
    value = layer.inputs[0]
    head = g.maker(value)
    if value is None or head is None or head.op != "Fused" or anchored(head, ("Conv",)) != "Conv" or len(layer.outputs) != 1:
        return None
    conv = next(x for x in head.regions["body"].layers if x.op == "Conv")
    x = conv.inputs[0]
    if value.dtype not in (I8, U8) or value.type.rank != 4 or x is None or not isinstance(x.shape[1], int) or x.shape[1] > _FEW:
        return None
    if reason := g.shared(value, layer):
        return Skip(reason)
    image = g.maker(head.inputs[0])
    found = None if image is None or image.op != "QuantizeLinear" else scales_of(image)
    if image is None or found is None or not found.per_tensor or g.shared(image.output, head):
        return fuse_whole(g, "ConvPool", head, layer)
    return fuse_whole(g, "ConvPool", image, head, layer)
