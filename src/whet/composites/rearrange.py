"""A Reshape that splits the channels of an image in two and a Transpose of the inner part to the last axis become one layer (detector heads)."""

from __future__ import annotations

import numpy as np

from whet.composites._base import register_composite
from whet.composites._samples import Regions
from whet.network import Layer, Network, Tensor, parse_type
from whet.ops import Sample
from whet.rewrite.fusing import fuse_flat
from whet.rewrite.graph import Graph
from whet.rewrite.rules import Skip


def make_rearrange_sample(shape: tuple[int, ...], split: tuple[int, ...], perm: tuple[int, ...], dtype: str = "f32") -> Sample:
    """An image of `shape` reshaped to `split` and transposed by `perm`."""
    text = f"{dtype}[{','.join(map(str, shape))}]"

    def build_regions() -> Regions:
        body = Network("body", "lowered")
        x, s = body.add_input("x", parse_type(text)), body.add_input("s", parse_type(f"i64[{len(split)}]"))
        s.shape_value = split
        body.mark_output(body.add("Transpose", body.add("Reshape", x, s), perm=perm))
        return {"body": body}

    return Sample([text if dtype == "f32" else f"full {text}", np.array(split, np.int64)], {"composite": "Rearrange"}, build_regions)


REARRANGE = register_composite(
    "Rearrange",
    title="split and transpose of channels",
    unsupported="no tactic here splits and transposes channels in one kernel",
    samples=[
        make_rearrange_sample((2, 6, 3, 5), (2, 2, 3, 3, 5), (0, 1, 3, 4, 2)),
        make_rearrange_sample((1, 12, 4, 7), (1, 3, 4, 4, 7), (0, 1, 3, 4, 2), "u8"),
    ],
)


@REARRANGE.matcher("Transpose")
def fuse_rearrange(g: Graph, layer: Layer) -> Tensor | Skip | None:
    reshape = g.maker(layer.inputs[0])
    x = reshape.inputs[0] if reshape is not None and reshape.op == "Reshape" else None
    if reshape is None or x is None or x.is_constant or g.maker(x) is None or x.type.rank not in (4, 5):
        return None
    before, after = tuple(x.shape), tuple(reshape.output.shape)
    if len(after) != len(before) + 1 or after[:1] != before[:1] or after[3:] != before[2:] or layer.attrs["perm"][-1] != 2:
        return None
    if not all(isinstance(d, int) for d in (*after[1:3], before[1])):
        return None
    reason = g.escapes(reshape.output, layer)
    return Skip(reason) if reason else fuse_flat(g, REARRANGE.kind, reshape, layer)
