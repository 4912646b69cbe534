"""A Concat of images along channels and the batch normalization that alone reads it become one layer, as in DenseNet: nothing is copied."""

from __future__ import annotations

from whet.composites._base import register_composite
from whet.composites._samples import Regions, activate, add_fused, make_body
from whet.network import Layer, Network, Tensor
from whet.ops import Sample
from whet.rewrite.fusing import ACTIVATIONS, fuse_nested
from whet.rewrite.graph import Graph
from whet.rewrite.rules import Skip

MOST_PARTS = 64


def concat_norm_sample(images: int, channels: tuple[int, ...], h: int, w: int, act: str = "Relu") -> Sample:
    """act(batch_norm(concat(...)))."""
    c = sum(channels)
    inputs = [*(f"f32[{images},{n},{h},{w}]" for n in channels), *[f"const f32[{c}]"] * 3, f"const positive f32[{c}]"]

    def build_norm(body: Network, read: list[Tensor]) -> Tensor:
        y: Tensor = body.add("BatchNormalization", *read)
        return activate(body, y, act) if act else y

    def build_regions() -> Regions:
        body, own = make_body(inputs)
        read = [body.add("Concat", *own[: len(channels)], axis=1), *own[len(channels) :]]
        body.mark_output(add_fused(body, read, build_norm, "BatchNormalization") if act else build_norm(body, read))
        return {"body": body}

    return Sample(inputs, {"composite": "ConcatNorm"}, build_regions)


CONCAT_NORM = register_composite(
    "ConcatNorm",
    title="batch normalization of concatenated images",
    unsupported="no tactic here normalizes several images without concatenating them first",
    samples=[
        concat_norm_sample(2, (64, 32), 7, 5),
        concat_norm_sample(1, (16, 8, 8, 8, 8), 6, 6, ""),
        concat_norm_sample(3, (8, *[32] * 17), 4, 4, "silu"),
    ],
)


@CONCAT_NORM.matcher("BatchNormalization", "Fused", after=["fuse_pointwise", "fuse_concat_input_conv"])
def fuse_concat_norm(g: Graph, layer: Layer) -> Tensor | Skip | None:
    if (layer.composite or layer.op) != "BatchNormalization":
        return None
    joined = layer.inputs[0]
    concat = g.maker(joined)
    if concat is None or joined is None or concat.op != "Concat" or joined.type.rank != 4 or concat.attrs["axis"] % 4 != 1:
        return None
    if reason := g.escapes(joined, layer):
        return Skip(reason)
    readers = g.readers(layer.outputs[0])
    if layer.op == "BatchNormalization" and len(readers) == 1 and readers[0].op in ACTIVATIONS:
        return None  # fuse_pointwise joins the two first
    if any(t is None or t.is_constant for t in concat.inputs):
        return Skip(f"an input of '{concat.name}' is constant")
    if not 2 <= len(concat.inputs) <= MOST_PARTS:
        return Skip(f"'{concat.name}' has {len(concat.inputs)} inputs: the kernel reads at most {MOST_PARTS}")
    if any(not t.is_constant for t in layer.inputs[1:] if t is not None):
        return Skip("its statistics are computed at run time")
    return fuse_nested(g, CONCAT_NORM.kind, concat, layer)
