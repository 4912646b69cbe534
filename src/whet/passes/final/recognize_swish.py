"""x * Sigmoid(a * x) becomes Swish, where fuse_silu did not put it into the epilogue of a convolution or matrix product."""

from __future__ import annotations

from whet.network import Layer, Tensor
from whet.rewrite.graph import Graph
from whet.rewrite.matching import find_interior_escape, find_maker_of_op, match_product
from whet.rewrite.rules import Phase, Skip, rule


@rule("Mul", phase=Phase.FINAL)
def recognize_swish(g: Graph, layer: Layer) -> Tensor | Skip | None:
    for x, gate in (layer.inputs, layer.inputs[::-1]):
        sigmoid = find_maker_of_op(g, gate, "Sigmoid")
        arg = sigmoid.inputs[0] if sigmoid is not None else None
        if sigmoid is None or arg is None or x is None or not x.dtype.is_float:
            continue
        p = match_product(g, arg) if arg is not x else None
        if p is not None and p.factors != [x]:
            continue
        if reason := find_interior_escape(g, layer, [sigmoid, *(p.layers if p is not None else [])]):
            return Skip(reason)
        return g.add("Swish", x, alpha=p.number if p is not None else 1.0)
    return None
