"""A pointwise convolution and the convolution with several taps that alone reads it become one layer, where channels are few.

Both stay fused layers in the body.
"""

from __future__ import annotations

from whet.composites._base import register_composite
from whet.composites._samples import Regions, activate, add_fused, make_body, parse_dims
from whet.network import Layer, Network, Tensor
from whet.ops import Sample
from whet.rewrite.fusing import (
    find_conv_input,
    find_conv_weights,
    find_fusion_obstacle,
    find_inner_conv,
    fuse_nested,
    is_conv,
    is_pointwise_conv,
    list_epilogue_steps,
)
from whet.rewrite.graph import Graph
from whet.rewrite.rules import Skip

_MAX_CHANNELS = 64  # of the hidden activations: with more, computing pixels at tile edges twice costs more than a launch


def make_pointwise_conv_sample(x: str, k: int, *, taps: int = 3, stride: int = 1, act: str = "silu", residual: bool = False) -> Sample:
    """A pointwise convolution that keeps the number of channels, `act`, a convolution to `k` channels, `act`, and the input added at the end."""
    c = parse_dims(x)[1]
    inputs = [x, f"const f32[{c},{c},1,1]", f"const f32[{c}]", f"const f32[{k},{c},{taps},{taps}]", f"const f32[{k}]"]

    def build_first(body: Network, read: list[Tensor]) -> Tensor:
        return activate(body, body.add("Conv", *read), act)

    def build_last(body: Network, read: list[Tensor]) -> Tensor:
        y = activate(body, body.add("Conv", *read[:3], pads=(taps // 2,) * 4, strides=(stride,) * 2), act)
        return body.add("Add", y, read[3]) if residual else y

    def build_regions() -> Regions:
        body, own = make_body(inputs)
        between = add_fused(body, own[:3], build_first)
        body.mark_output(add_fused(body, [between, *own[3:], *own[: int(residual)]], build_last))
        return {"body": body}

    return Sample(inputs, {"composite": "PointwiseThenConv"}, build_regions)


POINTWISE_THEN_CONV = register_composite(
    "PointwiseThenConv",
    title="pointwise convolution and convolution",
    unsupported="no tactic here computes a pointwise convolution and the convolution after it in one kernel",
    counts_parts=True,
    samples=[
        make_pointwise_conv_sample("f32[2,32,18,20]", 32, residual=True),
        make_pointwise_conv_sample("f32[1,64,11,13]", 40, stride=2),
        make_pointwise_conv_sample("f32[1,16,17,36]", 16, taps=5, act="Relu", residual=True),
    ],
)


@POINTWISE_THEN_CONV.matcher("*", after=["fuse_conv_then_pointwise"])
def fuse_pointwise_then_conv(g: Graph, layer: Layer) -> Tensor | Skip | None:
    if not is_conv(layer):
        return None
    conv = find_inner_conv(layer)
    w, a = find_conv_weights(conv), conv.attrs
    if w is None or w.shape[2:] == (1, 1) or a["group"] != 1 or set(a.get("dilations") or (1,)) != {1}:
        return None
    value = find_conv_input(layer)
    first = g.maker(value)
    if value is None or first is None or not is_conv(first) or not is_pointwise_conv(find_inner_conv(first)):
        return None
    filters = find_conv_weights(find_inner_conv(first))
    channels = None if filters is None else filters.shape[0]
    if filters is None or channels != filters.shape[1] or not isinstance(channels, int) or channels > _MAX_CHANNELS:
        return None
    if reason := find_fusion_obstacle(g, value, layer):
        return Skip(reason)
    if "add" in list_epilogue_steps(first):
        return Skip(f"the epilogue of '{first.name}' adds a residual")
    return fuse_nested(g, POINTWISE_THEN_CONV.kind, first, layer)
