"""Two pointwise convolutions that read the same image, or the same two concatenated images, become one layer with two outputs.

Blocks with two branches (C3 of YOLOv5, CSPNet) begin so: the image is read once and a launch is saved. Both stay fused layers in the body.
"""

from __future__ import annotations

from whet.composites._base import register_composite
from whet.composites._samples import Regions, activate, add_fused, make_body
from whet.composites.concat_input_conv import CONCAT_INPUT_CONV
from whet.network import Layer, Network, Tensor
from whet.ops import Sample
from whet.rewrite.fusing import find_conv_input, find_inner_conv, fuse_nested, is_conv, is_pointwise_conv, list_epilogue_steps
from whet.rewrite.graph import Graph
from whet.rewrite.rules import Skip


def make_dual_output_sample(
    images: int, channels: tuple[int, ...], filters: tuple[int, int], h: int, w: int, act: str = "silu"
) -> Sample:
    """act(build_conv(x) + bias) twice; `channels` are those of x, or of the two images that x concatenates."""
    c = sum(channels)
    inputs = [f"f32[{images},{n},{h},{w}]" for n in channels]
    constants = [t for k in filters for t in (f"const f32[{k},{c},1,1]", f"const f32[{k}]")]

    def build_conv(body: Network, read: list[Tensor]) -> Tensor:
        return activate(body, body.add("Conv", *read), act)

    def concat_conv(body: Network, read: list[Tensor]) -> Tensor:
        return add_fused(body, [body.add("Concat", *read[:2], axis=1), *read[2:]], build_conv)

    def build_regions() -> Regions:
        body, own = make_body([*inputs, *constants])
        own, weights = own[: len(inputs)], own[len(inputs) :]
        for i in range(2):
            read = [*own, *weights[2 * i : 2 * i + 2]]
            body.mark_output(add_fused(body, read, build_conv) if len(own) == 1 else add_fused(body, read, concat_conv, CONCAT_INPUT_CONV.kind))
        return {"body": body}

    return Sample([*inputs, *constants], {"composite": "DualOutputConv"}, build_regions)


DUAL_OUTPUT_CONV = register_composite(
    "DualOutputConv",
    title="two convolutions of one image",
    unsupported="no tactic here computes two convolutions of one image in one kernel",
    counts_parts=True,
    samples=[
        make_dual_output_sample(1, (16,), (16, 32), 6, 7),
        make_dual_output_sample(2, (64,), (32, 32), 9, 9),
        make_dual_output_sample(3, (160,), (64, 64), 20, 20, "Relu"),
        make_dual_output_sample(1, (320,), (160, 160), 10, 10),
        make_dual_output_sample(2, (64, 64), (64, 64), 12, 12),
        make_dual_output_sample(1, (32, 24), (48, 16), 9, 7, "HardSwish"),
        make_dual_output_sample(8, (32,), (32, 32), 40, 40),
    ],
)


@DUAL_OUTPUT_CONV.matcher("*", after=["fuse_concat_input_conv", "fuse_conv_then_pointwise", "fuse_pointwise_then_conv"])
def fuse_dual_output_conv(g: Graph, layer: Layer) -> dict[Tensor, Tensor] | Skip | None:
    images = _match_input_images(layer)
    if images is None:
        return None
    other = next((x for x in g.later_readers(images[0], layer) if _match_input_images(x) == images), None)
    if other is None:
        return None
    if _describe_epilogue(other) != _describe_epilogue(layer):
        return Skip(f"the epilogues of '{layer.name}' and '{other.name}' differ")
    outputs = (layer.output, other.output)
    return dict(zip(outputs, fuse_nested(g, DUAL_OUTPUT_CONV.kind, layer, other, outputs=outputs), strict=True))


def _match_input_images(layer: Layer) -> tuple[Tensor, ...] | None:
    """The image that a pointwise convolution on floats reads, or the two images that it concatenates; None for another layer."""
    images: tuple[Tensor | None, ...]
    if layer.composite == CONCAT_INPUT_CONV.kind:
        conv = layer.regions["body"].layers[-1]
        images = layer.inputs[:2]
    elif is_conv(layer) and is_pointwise_conv(find_inner_conv(layer)):
        conv, images = layer, (find_conv_input(layer),)
    else:
        return None
    if find_inner_conv(conv).attrs["group"] != 1 or "add" in list_epilogue_steps(conv):
        return None
    if any(t is None or not t.dtype.is_float for t in (*images, layer.output)):
        return None
    return tuple(t for t in images if t is not None)


def _describe_epilogue(layer: Layer) -> list[tuple]:
    """The operations and attributes after the convolution."""
    conv = layer.regions["body"].layers[-1] if layer.composite == CONCAT_INPUT_CONV.kind else layer
    if conv.op != "Fused":
        return []
    return [(x.op, sorted(x.attrs.items())) for x in conv.regions["body"].layers if x.op != "Conv"]
