"""A stem convolution and the max pooling that reads it become one layer, on floats or on 8-bit integers.

On integers the quantization of the image in front of the convolution is fused too.
"""

from __future__ import annotations

from typing import Any

from whet.composites._base import register_composite
from whet.composites._samples import Regions, add_fused, make_body
from whet.composites.quantize_then_conv import MAX_CHANNELS, STEM, has_static_scale, make_quantized_stem_sample
from whet.network import I8, U8, Layer, Network, Tensor
from whet.ops import Sample
from whet.rewrite.fusing import find_fusion_obstacle, find_inner_conv, fuse_nested, has_few_channels, is_conv
from whet.rewrite.graph import Graph
from whet.rewrite.rules import Skip


def make_conv_pool_sample(x: str, w: str, window: int, stride: int, pad: int, relu: bool, **attrs: Any) -> Sample:
    """A stem convolution with a bias, `relu` or not, and max pooling. `attrs` are those of the convolution."""
    inputs = [x, f"const {w}", f"const f32[{w.split('[')[1].split(',')[0]}]"]

    def build_regions() -> Regions:
        body, own = make_body(inputs)

        def build_conv(inner: Network, read: list[Tensor]) -> Tensor:
            y: Tensor = inner.add("Conv", *read, **attrs)
            return inner.add("Relu", y) if relu else y

        y = add_fused(body, own, build_conv)
        body.mark_output(body.add("MaxPool", y, kernel_shape=(window,) * 2, strides=(stride,) * 2, pads=(pad,) * 4))
        return {"body": body}

    return Sample(inputs, {"composite": "ConvPool"}, build_regions)


CONV_POOL = register_composite(
    "ConvPool",
    title="convolution and max pooling",
    unsupported="no tactic here computes a convolution and its pooling in one kernel",
    samples=[
        make_conv_pool_sample("f32[2,3,61,53]", "f32[64,3,7,7]", 3, 2, 1, relu=True, **STEM),
        make_conv_pool_sample("f32[1,3,40,40]", "f32[64,3,7,7]", 3, 2, 1, relu=False, **STEM),
        make_conv_pool_sample("f32[2,3,40,224]", "f32[64,3,7,7]", 3, 2, 1, relu=True, **STEM),
        make_conv_pool_sample("f32[1,2,36,72]", "f32[56,2,5,5]", 3, 2, 1, relu=False, strides=(2, 2), pads=(2, 2, 2, 2)),
        make_conv_pool_sample("f32[3,1,24,40]", "f32[64,1,3,3]", 3, 2, 1, relu=True, strides=(2, 2), pads=(1, 1, 1, 1)),
        make_conv_pool_sample("f32[1,1,37,30]", "f32[56,1,3,3]", 2, 2, 0, relu=False, pads=(1, 1, 1, 1)),
        make_quantized_stem_sample("f32[2,3,45,39]", "i8[64,3,7,7]", (3, 2, 1), **STEM),
        make_quantized_stem_sample("f32[2,3,44,48]", "i8[64,3,7,7]", (3, 2, 1), **STEM),
    ],
)


@CONV_POOL.matcher("MaxPool")
def fuse_conv_pool(g: Graph, layer: Layer) -> Tensor | Skip | None:
    """A stem convolution on floats and its max pooling become one layer; the convolution stays a layer in the body."""
    value = layer.inputs[0]
    head = g.maker(value)
    if value is None or head is None or not is_conv(head) or len(layer.outputs) != 1 or value.type.rank != 4:
        return None
    # With more channels, computing results that two windows share twice costs more than storing them.
    if not has_few_channels(find_inner_conv(head), MAX_CHANNELS):
        return None
    if reason := find_fusion_obstacle(g, value, layer):
        return Skip(reason)
    return fuse_nested(g, CONV_POOL.kind, head, layer)


@CONV_POOL.matcher("MaxPool", after=["fuse_conv_pool"])
def fuse_quantized_pool(g: Graph, layer: Layer) -> Tensor | Skip | None:
    """A stem convolution on 8-bit integers, its max pooling and the quantization of the image in front become one layer."""
    value = layer.inputs[0]
    head = g.maker(value)
    if value is None or head is None or head.op != "Fused" or not is_conv(head) or len(layer.outputs) != 1:
        return None
    if value.dtype not in (I8, U8) or value.type.rank != 4 or not has_few_channels(find_inner_conv(head), MAX_CHANNELS):
        return None
    if reason := g.escapes(value, layer):
        return Skip(reason)
    image = g.maker(head.inputs[0])
    if image is None or not has_static_scale(image) or g.escapes(image.output, head):
        return fuse_nested(g, CONV_POOL.kind, head, layer)
    return fuse_nested(g, CONV_POOL.kind, image, head, layer)
