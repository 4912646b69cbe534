"""Concats of Concats along the same axis become one, so that the values are copied once."""

from __future__ import annotations

from whet.network import Layer, Tensor
from whet.ops import normalize_axis
from whet.rewrite.graph import Graph
from whet.rewrite.rules import Phase, Skip, rule


@rule("Concat", phase=Phase.CLEAN)
def merge_concats(g: Graph, layer: Layer) -> Tensor | Skip | None:
    rank = layer.output.type.rank
    axis = normalize_axis(layer.attrs["axis"], rank)
    inputs: list[Tensor | None] = []
    kept = None
    for t in layer.inputs:
        first = g.maker(t)
        if t is None or first is None or first.op != "Concat" or normalize_axis(first.attrs["axis"], rank) != axis:
            inputs.append(t)
        elif reason := g.escapes(t, layer):
            kept = Skip(reason)
            inputs.append(t)
        else:
            inputs += first.inputs
    return kept if len(inputs) == len(layer.inputs) else g.add("Concat", *inputs, axis=axis)
