"""Hard swish spelled out, x * Clip(x + 3, 0, 6) / 6 or x * HardSigmoid(x), is one HardSwish; factors in any order."""

from __future__ import annotations

from whet.network import Layer, Tensor
from whet.passes._base import Phase, Skip, rule
from whet.passes._graph import Graph
from whet.passes._match import is_factor, made_by, near, private, product, sum_with
from whet.passes._weights import is_scalar


@rule("Mul", "Div", phase=Phase.RECOGNIZE)
def recognize_hard_swish(g: Graph, layer: Layer) -> Tensor | Skip | None:
    p = product(g, layer.output)
    if len(p.factors) != 2 or not layer.output.dtype.is_float:
        return None
    for x, gate in (p.factors, p.factors[::-1]):
        clip, hard = made_by(g, gate, "Clip"), made_by(g, gate, "HardSigmoid")
        if hard is not None and hard.inputs[0] is x and near(hard.attrs["alpha"], 1 / 6) and near(hard.attrs["beta"], 0.5):
            wanted, inside = 1.0, [hard]
        elif clip is not None and sum_with(g, clip.inputs[0], 3.0) is x and is_scalar(clip.input(1), 0.0) and is_scalar(clip.input(2), 6.0):
            wanted, inside = 1 / 6, [clip, *filter(None, [g.maker(clip.inputs[0])])]
        else:
            continue
        if not near(p.number, wanted):
            return None if is_factor(g, layer) else Skip(f"the factor is {p.number:g}, that of a hard swish is {wanted:g}")
        if reason := private(g, layer, [*inside, *(y for y in p.layers if y is not layer)]):
            return Skip(reason)
        return g.add("HardSwish", x) if x.type == layer.output.type else None
    return None
