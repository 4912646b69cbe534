"""A detector's head and the pointwise convolutions whose channels it rearranges become one layer; the convolutions stay layers in the body.

The convolutions' results are as large as the head's: they need not be stored.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from whet.composites._base import register_composite
from whet.composites._samples import Regions, make_body
from whet.composites.moves import MOVES, make_detector_head_sample
from whet.network import F32, Layer, Tensor
from whet.ops import Sample
from whet.rewrite.fusing import fuse_nested, is_pointwise_conv
from whet.rewrite.graph import Graph
from whet.rewrite.rules import Skip


def make_head_convs_sample(images: int, anchors: int, classes: int, *levels: tuple[int, int, int], padding: int = 0, bias: bool = True) -> Sample:
    """Boxes of a detector from images: a pointwise convolution of each level (channels, height, width), then `make_detector_head_sample`.
    `padding` output channels are unused."""
    filters = anchors * (5 + classes) + padding
    moves = make_detector_head_sample(images, anchors, classes, *((h, w) for _, h, w in levels), padding=padding)
    inputs: list[Any] = []
    for c, h, w in levels:
        inputs += [f"f32[{images},{c},{h},{w}]", f"const f32[{filters},{c},1,1]", *([f"const f32[{filters}]"] if bias else [])]
    per_conv, constants = 3 if bias else 2, [t for t in moves.inputs if isinstance(t, np.ndarray)]

    def build_regions() -> Regions:
        body, own = make_body([*inputs, *constants])
        others = iter(own[len(inputs) :])
        convs = iter([body.add("Conv", *own[per_conv * k : per_conv * (k + 1)]) for k in range(len(levels))])
        read = [next(others) if isinstance(t, np.ndarray) else next(convs) for t in moves.inputs]
        assert moves.regions is not None
        body.mark_output(body.add("Fused", *read, composite=MOVES.kind, regions=moves.regions()))
        return {"body": body}

    return Sample([*inputs, *constants], {"composite": "HeadConvs"}, build_regions)


HEAD_CONVS = register_composite(
    "HeadConvs",
    title="detector head with its convolutions",
    unsupported="no tactic here convolves pixels and writes a detector's rows in one kernel",
    counts_parts=True,
    samples=[
        make_head_convs_sample(2, 3, 2, (8, 4, 6), (16, 2, 3)),
        make_head_convs_sample(1, 3, 80, (64, 20, 20), (20, 10, 10), (36, 5, 5), padding=1),
        make_head_convs_sample(3, 1, 1, (12, 7, 5), bias=False),
        make_head_convs_sample(2, 2, 11, (16, 9, 9), (32, 5, 3)),
    ],
)


@HEAD_CONVS.matcher("Fused", after=["fuse_moves", "pad_moved_channels"])
def fuse_head_convs(g: Graph, layer: Layer) -> Tensor | Skip | None:
    """A detector's head and the pointwise convolutions whose channels it rearranges become one layer.

    All its inputs must come from convolutions without epilogues: otherwise images would be read from memory anyway.
    """
    if layer.composite != MOVES.kind:
        return None
    inputs = list(dict.fromkeys(t for t in layer.inputs if t is not None and not t.is_constant))
    makers = [g.maker(t) for t in inputs]
    convs = [c for c in makers if c is not None and c.op == "Conv" and is_pointwise_conv(c)]
    if not convs:
        return None
    if len(convs) < len(makers):
        other = next(t for t, c in zip(inputs, makers, strict=True) if c not in convs)
        return Skip(f"%{other.name} is not the result of a 1x1 convolution without epilogue")
    for conv in convs:
        if conv.attrs["group"] != 1 or any(t is not None and not t.is_constant for t in conv.inputs[1:]):
            return Skip(f"'{conv.name}' has several groups, or weights that are computed at run time")
        if conv.output.dtype != F32:
            return Skip(f"%{conv.output.name} is {conv.output.dtype}: only 32-bit floating point is supported")
        if reason := g.escapes(conv.output, layer):
            return Skip(reason)
    return fuse_nested(g, HEAD_CONVS.kind, *sorted(convs, key=g.position), layer)
