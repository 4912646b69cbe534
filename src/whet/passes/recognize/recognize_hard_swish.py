"""x * Clip(x + 3, 0, 6) / 6 or x * HardSigmoid(x) becomes HardSwish; factors in any order."""

from __future__ import annotations

from whet.network import Layer, Tensor
from whet.rewrite.constants import is_scalar
from whet.rewrite.graph import Graph
from whet.rewrite.matching import find_interior_escape, find_maker_of_op, is_close, is_factor, match_add_constant, match_product
from whet.rewrite.rules import Phase, Skip, rule


@rule("Mul", "Div", phase=Phase.RECOGNIZE)
def recognize_hard_swish(g: Graph, layer: Layer) -> Tensor | Skip | None:
    p = match_product(g, layer.output)
    if len(p.factors) != 2 or not layer.output.dtype.is_float:
        return None
    for x, gate in (p.factors, p.factors[::-1]):
        clip, hard = find_maker_of_op(g, gate, "Clip"), find_maker_of_op(g, gate, "HardSigmoid")
        if hard is not None and hard.inputs[0] is x and is_close(hard.attrs["alpha"], 1 / 6) and is_close(hard.attrs["beta"], 0.5):
            wanted, inside = 1.0, [hard]
        elif clip is not None and match_add_constant(g, clip.inputs[0], 3.0) is x and is_scalar(clip.input(1), 0.0) and is_scalar(clip.input(2), 6.0):
            wanted, inside = 1 / 6, [clip, *filter(None, [g.maker(clip.inputs[0])])]
        else:
            continue
        if not is_close(p.number, wanted):
            return None if is_factor(g, layer) else Skip(f"the factor is {p.number:g}, that of a hard swish is {wanted:g}")
        if reason := find_interior_escape(g, layer, [*inside, *(y for y in p.layers if y is not layer)]):
            return Skip(reason)
        return g.add("HardSwish", x) if x.type == layer.output.type else None
    return None
