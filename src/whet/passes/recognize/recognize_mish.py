"""x * Tanh(Softplus(x)) becomes Mish."""

from __future__ import annotations

from whet.network import Layer, Tensor
from whet.rewrite.graph import Graph
from whet.rewrite.matching import find_interior_escape, find_maker_of_op
from whet.rewrite.rules import Phase, Skip, rule


@rule("Mul", phase=Phase.RECOGNIZE)
def recognize_mish(g: Graph, layer: Layer) -> Tensor | Skip | None:
    for x, gate in (layer.inputs, layer.inputs[::-1]):
        tanh = find_maker_of_op(g, gate, "Tanh")
        soft = find_maker_of_op(g, tanh.inputs[0], "Softplus") if tanh is not None else None
        if tanh is None or soft is None or soft.inputs[0] is not x or x is None or not x.dtype.is_float:
            continue
        if reason := find_interior_escape(g, layer, [tanh, soft]):
            return Skip(reason)
        return g.add("Mish", x)
    return None
