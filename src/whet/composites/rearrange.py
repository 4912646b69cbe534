"""A Reshape that splits an image's channels in two and a Transpose that moves the inner part behind the pixels become one layer (detector heads)."""

from __future__ import annotations

from whet.composites._base import composite
from whet.network import Layer, Tensor
from whet.rewrite.fusing import fuse_flat
from whet.rewrite.graph import Graph
from whet.rewrite.rules import Skip

REARRANGE = composite(
    "Rearrange",
    title="split and transpose of channels",
    unsupported="no tactic here splits and transposes channels in one kernel",
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
