"""A group or instance normalization and the activation of its result become one layer (the U-Nets of diffusion models, style transfer)."""

from __future__ import annotations

from whet.composites._base import register_composite
from whet.composites._samples import Regions, activate, make_body, parse_dims
from whet.network import Layer, Tensor
from whet.ops import Sample
from whet.rewrite.fusing import ACTIVATIONS, find_fusion_obstacle, fuse_flat
from whet.rewrite.graph import Graph
from whet.rewrite.rules import Skip

NORMS = ("GroupNormalization", "InstanceNormalization")


def make_activated_norm_sample(x: str, activation: str, groups: int = 0) -> Sample:
    """The activation of a norm of `groups` groups of channels (0: instance normalization)."""
    channels = parse_dims(x)[1]
    inputs = [x, f"const f32[{channels}]", f"const f32[{channels}]"]

    def build_regions() -> Regions:
        body, own = make_body(inputs)
        normed = body.add(NORMS[0], *own, num_groups=groups) if groups else body.add(NORMS[1], *own)
        body.mark_output(activate(body, normed, activation))
        return {"body": body}

    return Sample(inputs, {"composite": "ActivatedNorm"}, build_regions)


ACTIVATED_NORM = register_composite(
    "ActivatedNorm",
    title="normalization of channel groups and an activation",
    unsupported="no tactic here computes the activation of a normalization in its kernel",
    samples=[
        make_activated_norm_sample("f32[2,48,9,11]", "Relu", 4),
        make_activated_norm_sample("f32[1,320,8,8]", "Swish", 32),
        make_activated_norm_sample("f32[3,24,7,5]", "LeakyRelu"),
    ],
)


@ACTIVATED_NORM.matcher(*ACTIVATIONS)
def fuse_activated_norm(g: Graph, layer: Layer) -> Tensor | Skip | None:
    """A group or instance normalization and the activation that alone reads it become one layer."""
    norm, value = g.maker(layer.inputs[0]), layer.inputs[0]
    if norm is None or value is None or norm.op not in NORMS:
        return None
    if any(t is not None and not t.is_constant for t in (*norm.inputs[1:], *layer.inputs[1:])):
        return Skip(f"a parameter of '{norm.name}' or '{layer.name}' is computed at run time")
    if reason := find_fusion_obstacle(g, value, layer):
        return Skip(reason)
    return fuse_flat(g, ACTIVATED_NORM.kind, norm, layer)
