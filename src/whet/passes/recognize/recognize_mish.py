"""Mish spelled out, x * Tanh(Softplus(x)), is one Mish."""

from __future__ import annotations

from whet.network import Layer, Tensor
from whet.passes._base import Phase, Skip, rule
from whet.passes._graph import Graph
from whet.passes._match import made_by, private


@rule("Mul", phase=Phase.RECOGNIZE)
def recognize_mish(g: Graph, layer: Layer) -> Tensor | Skip | None:
    for x, gate in (layer.inputs, layer.inputs[::-1]):
        tanh = made_by(g, gate, "Tanh")
        soft = made_by(g, tanh.inputs[0], "Softplus") if tanh is not None else None
        if tanh is None or soft is None or soft.inputs[0] is not x or x is None or not x.dtype.is_float:
            continue
        if reason := private(g, layer, [tanh, soft]):
            return Skip(reason)
        return g.add("Mish", x)
    return None
