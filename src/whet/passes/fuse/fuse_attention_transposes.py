"""Transposes around attention, and parts taken of a stacked q, k and v, go into it: a kernel that computes it at once reads any strides.

A transpose of the result goes in too. What others read as well stays outside.
"""

from __future__ import annotations

from whet.network import Layer, Tensor
from whet.passes._base import Phase, Skip, rule
from whet.passes._fuse import fuse
from whet.passes._graph import Graph
from whet.passes._weights import scalar


@rule("Fused", "Transpose", phase=Phase.FUSE, after=("recognize_attention",), level=2)
def fuse_attention_transposes(g: Graph, layer: Layer) -> Tensor | Skip | None:
    if layer.op == "Transpose":
        attention = g.maker(layer.inputs[0])
        if attention is None or attention.composite != "Attention":
            return None
        reason = g.shared(attention.output, layer)
        return Skip(reason) if reason else fuse(g, "Attention", attention, layer)
    if layer.composite != "Attention":
        return None
    members = [layer]
    while (more := _before(g, members)) is not None:
        members.append(more)
    return fuse(g, "Attention", *sorted(members, key=g.place)) if len(members) > 1 else None


def _before(g: Graph, members: list[Layer]) -> Layer | None:
    """A layer that only rearranges what `members` read, and that nobody else reads."""
    for t in (t for m in members for t in m.inputs):
        made = g.maker(t)
        if t is None or made is None or made in members or g.shared(t, *(m for m in members if t in m.inputs)) is not None:
            continue
        picks = made.op == "Gather" and made.inputs[1] is not None and made.inputs[1].type.rank == 0 and scalar(made.inputs[1]) is not None
        if made.op == "Transpose" or picks:
            return made
    return None
