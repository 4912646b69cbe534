"""A Transpose before a Reshape that merges its last axes leaves the order of its first axes to a second Transpose after the Reshape.

Attention of `[S, B, C]` writes [B, H, S, D] -> [S, B, H, D] -> [S, B, C]: the heads are merged as everywhere else, and the second Transpose, of whole
rows, can move below the projection and meets its inverse there.
"""

from __future__ import annotations

from whet.network import Layer, Tensor
from whet.rewrite.graph import Graph
from whet.rewrite.matching import find_maker_of_op
from whet.rewrite.rules import Phase, Skip, rule


@rule("Reshape", phase=Phase.CLEAN, after=["cancel_reshapes", "cancel_transposes"])
def split_transposes(g: Graph, layer: Layer) -> Tensor | Skip | None:
    transpose = find_maker_of_op(g, layer.inputs[0], "Transpose")
    if transpose is None:
        return None
    perm, shape, y = tuple(transpose.attrs["perm"]), transpose.output.shape, layer.output
    kept = y.type.rank - 1
    if kept < 2 or len(perm) <= kept + 1 or tuple(y.shape[:kept]) != tuple(shape[:kept]) or list(perm[:kept]) == sorted(perm[:kept]):
        return None
    order = sorted(range(kept), key=lambda i: perm[i])  # of the first axes: their places in the source, ascending
    target = (*(y.shape[i] for i in order), y.shape[-1])
    if reason := g.escapes(transpose.output, layer):
        return Skip(reason)
    if any(d == 0 for d in target) or not g.is_sized(target):
        return Skip(f"the shape of %{y.name}: {y.type} is not known")
    inner = g.add("Transpose", transpose.inputs[0], perm=(*(perm[i] for i in order), *perm[kept:]), name=transpose.name, sources=transpose.sources)
    merged = g.add("Reshape", inner, shape=target, name=f"{layer.name}_merged", sources=layer.sources)
    return g.add("Transpose", merged, perm=(*(order.index(i) for i in range(kept)), kept))
