"""The quantization of an image goes into the stem convolution, which reads the image's floats and computes on integers."""

from __future__ import annotations

from typing import Any

import numpy as np

from whet.composites._base import register_composite
from whet.composites._samples import Regions, add_fused, make_body
from whet.network import Layer, Network, Tensor
from whet.ops import Sample
from whet.rewrite.fusing import find_inner_conv, fuse_nested, has_few_channels, is_conv
from whet.rewrite.graph import Graph
from whet.rewrite.quantization import find_scales
from whet.rewrite.rules import Skip

MAX_CHANNELS = 4  # input channels of a stem: kernels for more channels read images in another format
STEM: dict[str, Any] = {"strides": (2, 2), "pads": (3, 3, 3, 3)}


def make_quantized_stem_sample(x: str, w: str, pool: tuple[int, int, int] | None = None, **attrs: Any) -> Sample:
    """A stem convolution on integers, from a float image that is quantized to i8; max pooled by `pool` (window, stride, padding)."""
    k = int(w.split("[")[1].split(",")[0])
    constants = [np.asarray(v) for v in (np.float32(0.02), np.int8(5), np.full(k, 0.004, np.float32), np.float32(0.05), np.uint8(3))]
    inputs: list[Any] = [x, constants[0], constants[1], f"const {w}", *constants[2:]]

    def build_regions() -> Regions:
        body, (image, *own) = make_body(inputs)
        integers = body.add("QuantizeLinear", image, *own[:2])

        def build_conv(inner: Network, read: list[Tensor]) -> Tensor:
            q, scale, zero, weights, scales, out_scale, out_zero = read
            real = inner.add("DequantizeLinear", weights, scales, axis=0)
            y = inner.add("Relu", inner.add("Conv", inner.add("DequantizeLinear", q, scale, zero), real, **attrs))
            return inner.add("QuantizeLinear", y, out_scale, out_zero)

        y = add_fused(body, [integers, *own], build_conv)
        if pool is not None:
            y = body.add("MaxPool", y, kernel_shape=pool[:1] * 2, strides=pool[1:2] * 2, pads=pool[2:] * 4)
        body.mark_output(y)
        return {"body": body}

    return Sample(inputs, {"composite": "ConvPool" if pool else "QuantizeThenConv"}, build_regions)


QUANTIZE_THEN_CONV = register_composite(
    "QuantizeThenConv",
    title="quantization and convolution",
    unsupported="no tactic here quantizes an image and convolves it in one kernel",
    samples=[
        make_quantized_stem_sample("f32[2,3,45,39]", "i8[40,3,3,3]", strides=(2, 2), pads=(1, 1, 1, 1)),
        make_quantized_stem_sample("f32[1,3,28,40]", "i8[32,3,6,6]", strides=(2, 2), pads=(2, 2, 2, 2)),
    ],
)


def has_static_scale(layer: Layer) -> bool:
    """True if a layer is a QuantizeLinear with one constant scale."""
    scales = find_scales(layer) if layer.op == "QuantizeLinear" else None
    return scales is not None and scales.per_tensor


@QUANTIZE_THEN_CONV.matcher("Fused", after=["fuse_quantized_pool"])
def fuse_quantize_then_conv(g: Graph, layer: Layer) -> Tensor | Skip | None:
    if not is_conv(layer) or layer.output.dtype.bits != 8:
        return None
    image = g.maker(layer.inputs[0])
    if not has_few_channels(find_inner_conv(layer), MAX_CHANNELS) or image is None or image.op != "QuantizeLinear":
        return None
    if not has_static_scale(image):
        return Skip("the image has more than one scale, or one that is computed at run time")
    if reason := g.escapes(image.output, layer):
        return Skip(reason)
    return fuse_nested(g, QUANTIZE_THEN_CONV.kind, image, layer)
