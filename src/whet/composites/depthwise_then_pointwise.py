"""A depthwise convolution and the pointwise convolution that reads it become one layer; both stay fused layers in the body."""

from __future__ import annotations

from whet.composites._base import register_composite
from whet.composites._samples import Regions, add_fused, make_body, parse_dims
from whet.network import Layer, Network, Tensor
from whet.ops import Sample
from whet.rewrite.fusing import find_conv_before_pointwise, find_conv_weights, find_inner_conv, fuse_conv_pair
from whet.rewrite.graph import Graph
from whet.rewrite.rules import Skip


def make_depthwise_pointwise_sample(x: str, k: int, stride: int, *, taps: int = 3, act: str = "Relu", residual: bool = False) -> Sample:
    """An inverted residual's end: a depthwise convolution, `act`, a pointwise convolution to `k` channels, then a residual or Relu."""
    n, c, h, w = parse_dims(x)
    size, pad = [(v - 1) // stride + 1 for v in (h, w)], taps // 2
    inputs = [x, f"const f32[{c},1,{taps},{taps}]", f"const f32[{c}]", f"const f32[{k},{c},1,1]", f"const f32[{k}]"]
    inputs += [f"f32[{n},{k},{size[0]},{size[1]}]"] if residual else []

    def build_first(body: Network, read: list[Tensor]) -> Tensor:
        return body.add(act, body.add("Conv", *read, group=c, strides=(stride,) * 2, pads=(pad,) * 4))

    def build_last(body: Network, read: list[Tensor]) -> Tensor:
        z = body.add("Conv", *read[:3])
        return body.add("Add", z, read[3]) if residual else body.add("Relu", z)

    def build_regions() -> Regions:
        body, own = make_body(inputs)
        between = add_fused(body, own[:3], build_first)
        body.mark_output(add_fused(body, [between, *own[3:]], build_last))
        return {"body": body}

    return Sample(inputs, {"composite": "DepthwiseThenPointwise"}, build_regions)


DEPTHWISE_THEN_POINTWISE = register_composite(
    "DepthwiseThenPointwise",
    title="depthwise and pointwise convolution",
    unsupported="no tactic here computes a depthwise convolution and the pointwise convolution after it in one kernel",
    counts_parts=True,
    samples=[
        make_depthwise_pointwise_sample("f32[1,96,14,14]", 24, 1, residual=True),
        make_depthwise_pointwise_sample("f32[2,144,28,27]", 32, 2),
        make_depthwise_pointwise_sample("f32[1,960,7,7]", 160, 1),
        make_depthwise_pointwise_sample("f32[1,40,9,11]", 16, 1, taps=5, act="HardSwish"),
        make_depthwise_pointwise_sample("f32[3,32,56,56]", 16, 1),
        make_depthwise_pointwise_sample("f32[40,64,28,28]", 96, 1, residual=True),
    ],
)


@DEPTHWISE_THEN_POINTWISE.matcher("*", after=["fuse_conv_sum"])
def fuse_depthwise_then_pointwise(g: Graph, layer: Layer) -> Tensor | Skip | None:
    pair = find_conv_before_pointwise(g, layer)
    if pair is None:
        return None
    first, value = pair
    conv = find_inner_conv(first)
    w = find_conv_weights(conv)
    if w is None or w.shape[1] != 1 or conv.attrs["group"] != w.shape[0] or w.shape[2:] == (1, 1):
        return None
    return fuse_conv_pair(g, DEPTHWISE_THEN_POINTWISE.kind, first, value, layer)
