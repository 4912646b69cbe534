"""Successive Reshape, Flatten, Squeeze and Unsqueeze layers become one Reshape, or none if the shape is unchanged."""

from __future__ import annotations

from whet.network import Layer, Tensor
from whet.ops._strided import RESHAPES
from whet.rewrite.graph import Graph
from whet.rewrite.rules import Phase, Skip, rule


@rule(*RESHAPES, phase=Phase.CLEAN, after=["fold_shapes"])
def cancel_reshapes(g: Graph, layer: Layer) -> Tensor | Skip | None:
    x, y = layer.inputs[0], layer.output
    if x is None or x.type == y.type:
        return x
    first = g.maker(x)
    if first is None or first.op not in RESHAPES:
        return None
    if g.is_output(x):
        return Skip(f"%{x.name} is an output of the network")
    inner = first.inputs[0]
    if inner is None or inner.type == y.type:
        return inner
    if any(d == 0 for d in y.shape):
        return Skip(f"a dimension of {y.type} is 0, which Reshape would read as a copy")
    if not g.is_sized(y.shape):
        return Skip(f"the shape of %{y.name}: {y.type} depends on data")
    return g.add("Reshape", inner, shape=y.shape)
