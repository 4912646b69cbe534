"""Two 1x1 convolutions that read the same image, or the same two joined ones, become one layer with two results; both stay whole in the body.

A block that goes on along two ways (C3 of YOLOv5, CSPNet) begins so: the image is read once and a launch goes.
"""

from __future__ import annotations

from whet.network import Layer, Tensor
from whet.passes._base import Phase, Skip, rule
from whet.passes._fuse import anchored, conv_of, conv_read, fuse_whole, plain_product, steps
from whet.passes._graph import Graph

KIND = "DualOutputConv"


@rule("*", phase=Phase.FINAL, after=["fuse_concat_input_conv", "fuse_conv_then_pointwise", "fuse_pointwise_then_conv"])
def fuse_dual_output_conv(g: Graph, layer: Layer) -> dict[Tensor, Tensor] | Skip | None:
    images = _images(layer)
    if images is None:
        return None
    others = [x for x in g.readers(images[0]) if x is not layer and g.place(x) > g.place(layer) and _images(x) == images]
    if not others:
        return None
    other = min(others, key=g.place)
    if _ends(other) != _ends(layer):
        return Skip(f"'{layer.name}' and '{other.name}' end in different ways")
    return dict(zip((layer.output, other.output), fuse_whole(g, KIND, layer, other, outputs=(layer.output, other.output)), strict=True))


def _images(layer: Layer) -> tuple[Tensor, ...] | None:
    """What a 1x1 convolution in floating point reads, one image or two whose channels are joined; None for another layer."""
    if anchored(layer, ("ConcatInputConv",)):
        inner = layer.regions["body"].layers[-1]
        images = layer.inputs[:2]
    elif anchored(layer, ("Conv",)) and plain_product(conv_of(layer)):
        inner, images = layer, (conv_read(layer, conv_of(layer)),)
    else:
        return None
    if conv_of(inner).attrs["group"] != 1 or "add" in steps(inner) or any(t is None or not t.dtype.is_float for t in (*images, layer.output)):
        return None
    return tuple(t for t in images if t is not None)


def _ends(layer: Layer) -> list[tuple]:
    """What follows the convolution."""
    inner = layer.regions["body"].layers[-1] if layer.composite == "ConcatInputConv" else layer
    if inner.op != "Fused":
        return []
    return [(x.op, sorted(x.attrs.items())) for x in inner.regions["body"].layers if x.op != "Conv"]
