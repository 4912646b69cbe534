"""Two quantized convolutions, of which one adds the other's integers, become one layer: a block's last convolution and its projection shortcut.

Both stay fused layers in the body: the first one's accumulators are rounded to its integers, which the second adds, but they are not stored.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from whet.composites._base import register_composite
from whet.composites._conv_pairs import find_added_conv, is_unpadded_1x1, match_conv_pair
from whet.composites._samples import Regions, add_fused, make_body
from whet.network import Layer, Network, Tensor
from whet.ops import Sample
from whet.rewrite.fusing import fuse_nested, is_conv, list_epilogue_steps
from whet.rewrite.graph import Graph
from whet.rewrite.rules import Skip

_IN_SCALE, _IN_ZERO, _OUT_SCALE, _OUT_ZERO = (np.asarray(v) for v in (np.float32(0.02), np.uint8(7), np.float32(0.04), np.uint8(100)))
_WEIGHT_SCALE = np.float32(0.0008)  # scales of single filters are half to twice of it


def make_quantized_sum_sample(x: str, w: str, y: str, v: str, *, stride: int = 1, pad: int = 0) -> Sample:
    """relu(build_conv(y, v) + build_conv(x, w) as integers): u8 activations, i8 filters with a scale per channel; the second has stride `stride`."""
    k = int(w.split("[")[1].split(",")[0])
    scales, bias = np.linspace(0.5, 2, k, dtype=np.float32) * _WEIGHT_SCALE, np.linspace(-1, 1, k, dtype=np.float32)
    inputs: list[Any] = [
        f"full {x}",
        _IN_SCALE,
        _IN_ZERO,
        f"const {w}",
        scales,
        bias,
        _OUT_SCALE,
        _OUT_ZERO,
        f"full {y}",
        f"const {v}",
        scales[::-1].copy(),
    ]

    def build_conv(net: Network, source: list[Tensor], filters: list[Tensor], bias: Tensor, stride: int, pad: int) -> Tensor:
        real = net.add("DequantizeLinear", *filters, axis=0)
        return net.add("Conv", net.add("DequantizeLinear", *source), real, bias, strides=(stride,) * 2, pads=(pad,) * 4)

    def build_first(net: Network, a: list[Tensor]) -> Tensor:
        return net.add("QuantizeLinear", build_conv(net, a[:3], a[3:5], a[5], 1, pad), *a[6:8])

    def build_last(net: Network, b: list[Tensor]) -> Tensor:
        z = net.add("Add", net.add("DequantizeLinear", *b[6:9]), build_conv(net, b[:3], b[3:5], b[5], stride, 0))
        return net.add("QuantizeLinear", net.add("Relu", z), *b[7:9])

    def build_regions() -> Regions:
        body, own = make_body(inputs)
        between = add_fused(body, own[:8], build_first)
        body.mark_output(add_fused(body, [own[8], own[1], own[2], own[9], own[10], own[5], between, own[6], own[7]], build_last))
        return {"body": body}

    return Sample(inputs, {"composite": "QuantizedSum"}, build_regions)


QUANTIZED_SUM = register_composite(
    "QuantizedSum",
    title="sum of two quantized convolutions",
    unsupported="no tactic here computes two quantized convolutions and their sum in one kernel",
    samples=[
        make_quantized_sum_sample("u8[2,64,9,9]", "i8[96,64,1,1]", "u8[2,32,9,9]", "i8[96,32,1,1]"),
        make_quantized_sum_sample("u8[1,32,14,14]", "i8[64,32,1,1]", "u8[1,48,28,28]", "i8[64,48,1,1]", stride=2),
    ],
)


@QUANTIZED_SUM.matcher("Fused", after=["fuse_conv_sum", "fuse_quantized_pool"])
def fuse_quantized_sum(g: Graph, layer: Layer) -> Tensor | Skip | None:
    if not is_conv(layer) or "add" not in list_epilogue_steps(layer):
        return None
    pair = find_added_conv(g, layer, integers=True)
    if pair is None:
        return None
    value, first = pair
    if reason := g.escapes(value, layer):
        return Skip(reason)
    convs = match_conv_pair(first, layer)
    if isinstance(convs, Skip):
        return convs
    if not is_unpadded_1x1(convs[1]):
        return Skip("the convolution that adds is not 1x1 without padding")
    return fuse_nested(g, QUANTIZED_SUM.kind, first, layer)
