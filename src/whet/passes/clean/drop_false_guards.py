"""Where(ReduceMax(mask) == -infinity, 0, p) is p, if the mask is an expanded constant that hides nothing.

PyTorch's exporter guards rows of which the mask hides every key, also where there is no mask: with a dynamic batch, zeros are expanded.
"""

from __future__ import annotations

import numpy as np

from whet.network import Layer, Tensor
from whet.rewrite.constants import scalar_value
from whet.rewrite.graph import Graph
from whet.rewrite.matching import find_maker_of_op
from whet.rewrite.rules import Phase, Skip, rule


@rule("Where", phase=Phase.CLEAN, after=["fold_constants"])
def drop_false_guards(g: Graph, layer: Layer) -> Tensor | Skip | None:
    equal, p = find_maker_of_op(g, layer.inputs[0], "Equal"), layer.inputs[2]
    if equal is None or p is None:
        return None
    largest = next((find_maker_of_op(g, a, "ReduceMax") for a, b in (equal.inputs, equal.inputs[::-1]) if scalar_value(b) == -np.inf), None)
    expand = find_maker_of_op(g, largest.inputs[0], "Expand") if largest is not None else None
    if expand is None:
        return None
    mask = expand.needs(0)
    if not mask.is_constant:
        return Skip(f"%{mask.name} is computed at run time and may hide every key")
    if (mask.array() == -np.inf).any():
        return Skip(f"%{mask.name} has negative infinities")
    return p if p.type == layer.output.type else None
