"""The guard of ONNX's Attention for rows of which every key is hidden becomes the guard that PyTorch's exporters write.

Where(ReduceMax(mask) == -infinity, 0, p) with p = Softmax(scores + mask) becomes Where(IsNaN(p), 0, p), which needs no reduction and is part of
kernels of attention. A row of probabilities that is NaN for another reason becomes 0 too.
"""

from __future__ import annotations

import numpy as np

from whet.network import Layer, Tensor
from whet.ops._reduce import reduced
from whet.rewrite.constants import scalar_value
from whet.rewrite.graph import Graph
from whet.rewrite.matching import maker_of_op
from whet.rewrite.rules import Phase, Skip, rule


@rule("Where", phase=Phase.CLEAN, after=["fold_constants", "fold_shapes"], level=2)
def row_guard_to_is_nan(g: Graph, layer: Layer) -> Tensor | Skip | None:
    condition, zero, weights = layer.inputs
    equal, softmax = maker_of_op(g, condition, "Equal"), maker_of_op(g, weights, "Softmax")
    add = maker_of_op(g, softmax.inputs[0], "Add") if softmax is not None else None
    if equal is None or softmax is None or add is None or weights is None or scalar_value(zero) != 0:
        return None
    largest = next((maker_of_op(g, t, "ReduceMax") for t, low in (equal.inputs, equal.inputs[::-1]) if scalar_value(low) == -np.inf), None)
    if largest is None or not any(t is largest.inputs[0] for t in add.inputs):
        return None
    mask = largest.inputs[0]
    if mask is None or reduced(largest) != (mask.type.rank - 1,) or not largest.attrs["keepdims"] or weights.type != layer.output.type:
        return Skip(f"'{largest.name}' does not reduce the keys of the mask")
    if softmax.attrs["axis"] not in (-1, weights.type.rank - 1):
        return Skip(f"the softmax is over axis {softmax.attrs['axis']}, not the last one")
    return g.add("Where", g.add("IsNaN", weights), zero, weights)
