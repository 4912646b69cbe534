"""MobileNet's inverted residual becomes one layer: its expansion, its depthwise convolution and its projection.

The first pointwise convolution expands the channels, the last one projects them back. All three stay fused layers with
their epilogues in the body.
"""

from __future__ import annotations

from whet.composites._base import register_composite
from whet.composites._samples import Regions, activate, add_fused, make_body, parse_dims
from whet.network import Layer, Network, Tensor
from whet.ops import Sample
from whet.rewrite.fusing import (
    find_conv_before_pointwise,
    find_conv_input,
    find_conv_weights,
    find_fusion_obstacle,
    find_inner_conv,
    fuse_nested,
    is_conv,
    is_pointwise_conv,
    list_epilogue_steps,
    outer_tensor,
)
from whet.rewrite.graph import Graph
from whet.rewrite.rules import Skip


def make_inverted_residual_sample(
    x: str, hidden: int, k: int, *, stride: int = 1, window: int = 3, act: str = "Relu", residual: bool = False
) -> Sample:
    """An expansion to `hidden` channels and `act`, a depthwise convolution and `act`, a projection to `k` channels with or without a residual."""
    n, c, h, w = parse_dims(x)
    size = [(v - 1) // stride + 1 for v in (h, w)]
    inputs = [x, f"const f32[{hidden},{c},1,1]", f"const f32[{hidden}]", f"const f32[{hidden},1,{window},{window}]", f"const f32[{hidden}]"]
    inputs += [f"const f32[{k},{hidden},1,1]", f"const f32[{k}]", *([f"f32[{n},{k},{size[0]},{size[1]}]"] if residual else [])]

    def build_expansion(body: Network, read: list[Tensor]) -> Tensor:
        return activate(body, body.add("Conv", *read), act)

    def build_depthwise(body: Network, read: list[Tensor]) -> Tensor:
        return activate(body, body.add("Conv", *read, group=hidden, strides=(stride,) * 2, pads=(window // 2,) * 4), act)

    def build_projection(body: Network, read: list[Tensor]) -> Tensor:
        z: Tensor = body.add("Conv", *read[:3])
        return body.add("Add", z, read[3]) if residual else z

    def build_regions() -> Regions:
        body, own = make_body(inputs)
        expanded = add_fused(body, own[:3], build_expansion)
        filtered = add_fused(body, [expanded, *own[3:5]], build_depthwise)
        body.mark_output(add_fused(body, [filtered, *own[5:]], build_projection))
        return {"body": body}

    return Sample(inputs, {"composite": "InvertedResidual"}, build_regions)


INVERTED_RESIDUAL = register_composite(
    "InvertedResidual",
    title="inverted residual",
    unsupported="no tactic here computes an expansion, a depthwise convolution and a projection in one kernel",
    counts_parts=True,
    samples=[
        make_inverted_residual_sample("f32[1,24,28,28]", 144, 24, residual=True),
        make_inverted_residual_sample("f32[2,16,27,30]", 96, 24, stride=2, act="HardSwish"),
        make_inverted_residual_sample("f32[1,40,14,14]", 240, 40, window=5, act="silu", residual=True),
        make_inverted_residual_sample("f32[3,12,9,11]", 72, 20, stride=2, window=5),
        make_inverted_residual_sample("f32[1,160,7,7]", 960, 320),
        make_inverted_residual_sample("f32[5,8,1,3]", 40, 8, window=7, residual=True),
    ],
)


@INVERTED_RESIDUAL.matcher("*", after=["fuse_conv_sum", "fuse_depthwise_then_pointwise"])
def fuse_inverted_residual(g: Graph, layer: Layer) -> Tensor | Skip | None:
    pair = find_conv_before_pointwise(g, layer)
    if pair is None:
        return None
    depthwise, filtered = pair
    expanded = find_conv_input(depthwise)
    expansion = g.maker(expanded)
    if expanded is None or expansion is None or not is_conv(expansion) or not is_pointwise_conv(find_inner_conv(expansion)):
        return None
    members = expansion, depthwise, layer
    first, middle, last = (find_inner_conv(m) for m in members)
    w, v, u = (find_conv_weights(c) for c in (first, middle, last))
    if w is None or v is None or u is None or v.shape[1] != 1 or middle.attrs["group"] != v.shape[0]:
        return None
    hidden, channels, results = (int(n) for n in (w.shape[0], w.shape[1], u.shape[0]))
    if hidden <= max(channels, results):
        return None
    if any(c.attrs["group"] != 1 for c in (first, last)):
        return Skip("a pointwise convolution has groups")
    for m, own in zip(members, (w, v, u), strict=True):
        t = outer_tensor(m, own)
        if t is None or not t.is_constant:
            return Skip(f"the weights of '{m.name}' are computed at run time")
    if reason := find_fusion_obstacle(g, filtered, layer) or find_fusion_obstacle(g, expanded, depthwise):
        return Skip(reason)
    if adding := next((m for m in members[:2] if "add" in list_epilogue_steps(m)), None):
        return Skip(f"the epilogue of '{adding.name}' adds a residual")
    return fuse_nested(g, INVERTED_RESIDUAL.kind, *members)
