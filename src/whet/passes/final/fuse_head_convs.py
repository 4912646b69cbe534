"""A detector's head takes in the 1x1 convolutions whose channels it moves about; they stay whole in the body.

What they make is as large as the result: it need not be stored.
"""

from __future__ import annotations

from whet.network import F32, Layer, Tensor
from whet.passes._base import Phase, Skip, rule
from whet.passes._fuse import fuse_whole, plain_product
from whet.passes._graph import Graph
from whet.passes.final.fuse_moves import KIND as MOVES

KIND = "HeadConvs"


@rule("Fused", phase=Phase.FINAL, after=["fuse_moves", "pad_moved_channels"])
def fuse_head_convs(g: Graph, layer: Layer) -> Tensor | Skip | None:
    """All that is moved has to come from convolutions with nothing behind them: else images would be read from memory all the same."""
    if layer.composite != MOVES:
        return None
    moved = list(dict.fromkeys(t for t in layer.inputs if t is not None and not t.is_constant))
    convs = [g.maker(t) for t in moved]
    found = [c for c in convs if c is not None and c.op == "Conv" and plain_product(c)]
    if not found:
        return None
    if len(found) < len(convs):
        other = next(t for t, c in zip(moved, convs, strict=True) if c not in found)
        return Skip(f"%{other.name} comes from no 1x1 convolution with nothing behind it")
    for conv in found:
        if conv.attrs["group"] != 1 or any(t is not None and not t.is_constant for t in conv.inputs[1:]):
            return Skip(f"'{conv.name}' has several groups, or weights that are computed at run time")
        if conv.output.dtype != F32:
            return Skip(f"%{conv.output.name} is {conv.output.dtype}: only 32-bit floating point is computed so")
        if reason := g.shared(conv.output, layer):
            return Skip(reason)
    return fuse_whole(g, KIND, *sorted(found, key=g.place), layer)
