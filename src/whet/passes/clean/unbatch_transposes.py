"""Reshape to three axes, Transpose of the last two and Reshape back become one Transpose of the last two axes.

PyTorch's dynamo exporter writes the transpose of keys so: [B, H, S, D] -> [B * H, S, D] -> [B * H, D, S] -> [B, H, D, S].
"""

from __future__ import annotations

from whet.network import Layer, Tensor
from whet.ops._strided import RESHAPES
from whet.rewrite.graph import Graph
from whet.rewrite.matching import find_interior_escape, find_maker_of_op
from whet.rewrite.rules import Phase, Skip, rule


@rule("Reshape", phase=Phase.CLEAN, after=["cancel_reshapes"])
def unbatch_transposes(g: Graph, layer: Layer) -> Tensor | Skip | None:
    transpose = find_maker_of_op(g, layer.inputs[0], "Transpose")
    merge = g.maker(transpose.inputs[0]) if transpose is not None else None
    if transpose is None or merge is None or merge.op not in RESHAPES or tuple(transpose.attrs["perm"]) != (0, 2, 1):
        return None
    x, y = merge.inputs[0], layer.output
    if x is None or y.type.rank < 4 or tuple(y.shape[-2:]) != tuple(transpose.output.shape[-2:]):
        return None
    if reason := find_interior_escape(g, layer, [merge, transpose]):
        return Skip(reason)
    rows, columns = transpose.output.shape[-1], transpose.output.shape[-2]
    unmerged = (*y.shape[:-2], rows, columns)
    if any(d == 0 for d in unmerged) or not g.is_sized(unmerged):
        return Skip(f"the shape of %{y.name}: {y.type} is not known")
    value = x if tuple(x.shape) == unmerged else g.add("Reshape", x, shape=unmerged)
    rank = y.type.rank
    return g.add("Transpose", value, perm=(*range(rank - 2), rank - 1, rank - 2))
