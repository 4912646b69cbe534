"""Clip(x + 3, 0, 6) / 6 becomes HardSigmoid with alpha 1/6 and beta 1/2, unless it is multiplied by x: that is a hard swish."""

from __future__ import annotations

from whet.network import Layer, Tensor
from whet.rewrite.constants import is_scalar
from whet.rewrite.graph import Graph
from whet.rewrite.matching import find_interior_escape, find_maker_of_op, is_close, match_add_constant, match_product
from whet.rewrite.rules import Phase, Skip, rule


@rule("Mul", "Div", phase=Phase.RECOGNIZE, after=["recognize_hard_swish"])
def recognize_hard_sigmoid(g: Graph, layer: Layer) -> Tensor | Skip | None:
    p = match_product(g, layer.output)
    clip = find_maker_of_op(g, p.factors[0], "Clip") if len(p.factors) == 1 else None
    if clip is None or not is_close(p.number, 1 / 6) or not is_scalar(clip.input(1), 0.0) or not is_scalar(clip.input(2), 6.0):
        return None
    x, add = match_add_constant(g, clip.inputs[0], 3.0), g.maker(clip.inputs[0])
    if x is None or add is None or not x.dtype.is_float or x.type != layer.output.type:
        return None
    if any(r.op == "Mul" and x in r.inputs for r in g.readers(layer.output)):
        return Skip("it is multiplied by its own input: the two are a hard swish")
    if reason := find_interior_escape(g, layer, [clip, add, *(y for y in p.layers if y is not layer)]):
        return Skip(reason)
    return g.add("HardSigmoid", x, alpha=1 / 6, beta=0.5)
