"""A reduction keeps its axes if a Reshape or Unsqueeze inserts them again."""

from __future__ import annotations

from whet.network import Layer, Tensor
from whet.ops._reduce import list_reduced_axes
from whet.rewrite.graph import Graph
from whet.rewrite.rules import Phase, Skip, rule


@rule("Reshape", "Unsqueeze", phase=Phase.CLEAN, after=["cancel_reshapes"])
def keep_reduced_axes(g: Graph, layer: Layer) -> Tensor | Skip | None:
    x = layer.inputs[0]
    reduction = g.maker(x)
    if x is None or reduction is None or not reduction.op.startswith("Reduce") or reduction.attrs["keepdims"]:
        return None
    axes = list_reduced_axes(reduction)
    if layer.output.shape != tuple(1 if i in axes else d for i, d in enumerate(reduction.needs(0).shape)):
        return None
    if reason := g.escapes(x, layer):
        return Skip(reason)
    return g.add(reduction.op, *reduction.inputs, **{**reduction.attrs, "keepdims": 1})
