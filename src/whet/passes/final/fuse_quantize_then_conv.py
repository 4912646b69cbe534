"""The quantization of an image goes into the first convolution, which reads its floats and computes on integers."""

from __future__ import annotations

from whet.network import Layer, Tensor
from whet.passes._base import Phase, Skip, rule
from whet.passes._fuse import anchored, fuse_whole
from whet.passes._graph import Graph
from whet.passes._quantize import scales_of

_FEW = 4  # input channels: larger images are read by other kernels


@rule("Fused", phase=Phase.FINAL, after=["fuse_quantized_pool"])
def fuse_quantize_then_conv(g: Graph, layer: Layer) -> Tensor | Skip | None:
    if anchored(layer, ("Conv",)) != "Conv" or layer.output.dtype.bits != 8:
        return None
    conv = next(x for x in layer.regions["body"].layers if x.op == "Conv")
    x, image = conv.inputs[0], g.maker(layer.inputs[0])
    if x is None or not isinstance(x.shape[1], int) or x.shape[1] > _FEW or image is None or image.op != "QuantizeLinear":
        return None
    found = scales_of(image)
    if found is None or not found.per_tensor:
        return Skip("the image has more than one scale, or one that is computed at run time")
    if reason := g.shared(image.output, layer):
        return Skip(reason)
    return fuse_whole(g, "QuantizeThenConv", image, layer)
