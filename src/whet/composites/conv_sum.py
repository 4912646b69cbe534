"""Two convolutions whose results are added become one layer: a residual block's last convolution and its projection shortcut.

The body keeps both as fused layers, so that decomposition restores them.
"""

from __future__ import annotations

from typing import Any

from whet.composites._base import register_composite
from whet.composites._conv_pairs import find_added_conv, is_unpadded_1x1, match_conv_pair
from whet.composites._samples import Regions, add_fused, make_body
from whet.network import Layer, Network, Tensor
from whet.ops import Sample
from whet.rewrite.fusing import find_fusion_obstacle, fuse_nested, list_epilogue_steps
from whet.rewrite.graph import Graph
from whet.rewrite.quantization import find_dequantizer
from whet.rewrite.rules import Skip


def make_conv_sum_sample(x: str, w: str, z: str, v: str, **attrs: dict[str, Any]) -> Sample:
    """relu(conv(x, w) + (conv(z, v) + bias)); `attrs` are those of the convolutions, by name "first" and "second".

    The second convolution has the sum and the activation in its epilogue, as fuse_conv_add and fuse_conv_activation create it.
    """
    inputs = [x, f"const {w}", z, f"const {v}", f"const f32[{w.split('[')[1].split(',')[0]}]"]

    def build_regions() -> Regions:
        body, own = make_body(inputs)
        first = body.add("Conv", *own[:2], **attrs.get("first", {}))

        def build_second(inner: Network, read: list[Tensor]) -> Tensor:
            return inner.add("Relu", inner.add("Add", inner.add("Conv", *read[:3], **attrs.get("second", {})), read[3]))

        body.mark_output(add_fused(body, [*own[2:], first], build_second))
        return {"body": body}

    return Sample(inputs, {"composite": "ConvSum"}, build_regions)


CONV_SUM = register_composite(
    "ConvSum",
    title="sum of two convolutions",
    unsupported="no tactic here computes two convolutions and their sum in one kernel",
    samples=[
        make_conv_sum_sample("f32[1,16,8,8]", "f32[32,16,1,1]", "f32[1,24,8,8]", "f32[32,24,1,1]"),
        make_conv_sum_sample(
            "f32[2,64,9,9]", "f32[64,64,3,3]", "f32[2,128,17,17]", "f32[64,128,1,1]", first={"pads": (1, 1, 1, 1)}, second={"strides": (2, 2)}
        ),
        make_conv_sum_sample("f32[1,256,14,14]", "f32[128,256,1,1]", "f32[1,128,28,28]", "f32[128,128,1,1]", second={"strides": (2, 2)}),
        make_conv_sum_sample(
            "f32[1,32,16,16]",
            "f32[48,32,1,1]",
            "f32[1,16,16,16]",
            "f32[48,16,3,3]",
            first={"strides": (2, 2)},
            second={"strides": (2, 2), "pads": (1, 1, 1, 1)},
        ),
        make_conv_sum_sample("f32[7,64,24,24]", "f32[128,64,1,1]", "f32[7,64,24,24]", "f32[128,64,1,1]"),
    ],
)


@CONV_SUM.matcher("*")
def fuse_conv_sum(g: Graph, layer: Layer) -> Tensor | Skip | None:
    if layer.composite != "Conv":
        return None
    pair = find_added_conv(g, layer, integers=False)
    if pair is None:
        return None
    value, first = pair
    if reason := find_fusion_obstacle(g, value, layer):
        return Skip(reason)
    steps = list_epilogue_steps(layer)
    before = steps[: steps.index("add")]
    if set(before) - {"bias"}:
        return Skip(f"'{layer.name}' adds %{value.name} after its {before[-1]}")
    convs = match_conv_pair(first, layer)
    if isinstance(convs, Skip):
        return convs
    if any(_is_quantized(g, x) for x in (first, layer)):
        return Skip("quantized weights: the convolutions compute in 8 bits, each by itself")
    if not any(is_unpadded_1x1(c) for c in convs):
        return Skip("neither convolution is 1x1 without padding")
    return fuse_nested(g, CONV_SUM.kind, first, layer)


def _is_quantized(g: Graph, layer: Layer) -> bool:
    """True if a convolution computes in 8 bits, or will after `fuse_dequantized`: its weights are dequantized."""
    if layer.op == "Fused" and any(x.op == "DequantizeLinear" for x in layer.regions["body"].layers):
        return True
    dequantizers = (find_dequantizer(g, t) for t in layer.inputs)
    return any(dq is not None and dq.needs(0).is_constant for dq in dequantizers)
