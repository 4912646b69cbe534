"""An image that is enlarged, the join with another one, and the 1x1 convolutions that read it become one layer; they stay whole in the body.

Nearest picks pixels and a 1x1 convolution sums within each of them, so either may come first: before it the convolution's share of the enlarged
image is a quarter of the work at twice the size, and neither the enlarged image nor the join is written. Necks of detectors do it at each level.
A machine that reads joined images where they lie (`fuse_concat_input_conv`) has no join left here.
"""

from __future__ import annotations

from whet.network import Layer, Tensor
from whet.passes._base import Phase, Skip, rule
from whet.passes._fuse import anchored, conv_of, conv_read, fuse_whole, plain_product, steps
from whet.passes._graph import Graph

KIND = "ResizedConv"


@rule("Conv", "Fused", phase=Phase.FINAL, after=["fuse_dual_output_conv"])
def fuse_resized_conv(g: Graph, layer: Layer) -> dict[Tensor, Tensor] | Skip | None:
    whole = _read(layer)
    join = g.maker(whole)
    if whole is None or join is None or join.op != "Concat" or whole.type.rank != 4 or join.attrs["axis"] % 4 != 1:
        return None
    enlarged = [x for t in join.inputs if (x := g.maker(t)) is not None and x.op == "Resize"]
    if not enlarged:
        return None
    if len(join.inputs) != 2 or len(enlarged) != 1 or any(t is None or t.is_constant for t in join.inputs):
        return Skip(f"'{join.name}' joins other than one enlarged image and one that is not")
    (resize,) = enlarged
    if resize.attrs["mode"] != "nearest" or resize.attrs["coordinate_transformation_mode"] == "tf_crop_and_resize":
        return Skip(f"'{resize.name}' computes pixels, it does not only pick them")
    if "add" in (steps(layer) if layer.op == "Fused" and layer.composite == "Conv" else []):
        return Skip(f"'{layer.name}' adds something else already")
    if not whole.dtype.is_float:
        return Skip(f"%{whole.name} is {whole.dtype}: only floating point is fused")
    for t, reader in ((resize.output, join), (whole, layer)):
        if reason := g.shared(t, reader):
            return Skip(reason)
    if (sizes := _sizes(resize)) is None:
        return Skip(f"how large '{resize.name}' makes it is computed at run time")
    made = fuse_whole(g, KIND, resize, join, layer, outputs=layer.outputs, given={resize: sizes})
    return dict(zip(layer.outputs, [made] if isinstance(made, Tensor) else made, strict=True))


def _sizes(resize: Layer) -> dict[str, tuple[float, ...]] | None:
    """Scales or sizes as attributes; None where they are computed at run time."""
    if any(t is not None and not t.is_constant for t in resize.inputs[1:]):
        return None
    found = {name: t for name, t in (("scales", resize.input(2)), ("sizes", resize.input(3))) if t is not None and t.shape != (0,)}
    return {name: tuple(t.array().reshape(-1).tolist()) for name, t in found.items()}


def _read(layer: Layer) -> Tensor | None:
    """What a 1x1 convolution in one group reads, or two convolutions of one image; None for another layer."""
    if anchored(layer, ("DualOutputConv",)):
        body = layer.regions["body"]
        images = {conv_read(x, conv_of(x)) for x in body.layers if anchored(x, ("Conv",))}
        if len(images) != 1 or len(body.layers) != 2:  # of two joined images each
            return None
        return dict(zip(body.inputs, layer.inputs, strict=True)).get(images.pop())
    if not anchored(layer, ("Conv",)) or not plain_product(conv_of(layer)) or conv_of(layer).attrs["group"] != 1:
        return None
    return conv_read(layer, conv_of(layer))
