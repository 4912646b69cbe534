"""A Transpose that moves only axes of one entry becomes a Reshape, which is a view."""

from __future__ import annotations

from whet.network import Layer, Tensor
from whet.rewrite.graph import Graph
from whet.rewrite.rules import Phase, Skip, rule


@rule("Transpose", phase=Phase.CLEAN, after=["cancel_transposes", "move_transposes", "sink_transposes"])
def transpose_to_reshape(g: Graph, layer: Layer) -> Tensor | Skip | None:
    x, y = layer.needs(0), layer.output
    moved = [p for p in layer.attrs["perm"] if x.shape[p] != 1]
    if moved != sorted(moved) or x.is_constant:
        return None
    if any(d == 0 for d in y.shape) or not g.is_sized(y.shape):
        return Skip(f"the shape of %{y.name}: {y.type} is not known")
    return g.add("Reshape", x, shape=y.shape)
