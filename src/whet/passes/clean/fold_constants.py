"""A layer whose inputs are all constants becomes a constant; its origin says how it was computed.

What would make the engine much larger than its inputs (an Expand of one number) stays a layer, and so do QuantizeLinear and
DequantizeLinear, which say in which type a weight is stored.
"""

from __future__ import annotations

import numpy as np

from whet.network import Layer, Origin, Tensor, Weight
from whet.ops import get_op, run_layer
from whet.rewrite.graph import Graph
from whet.rewrite.rules import Phase, Skip, rule

SMALL = 1 << 16  # bytes that a constant may always have
GROWTH = 2  # times the bytes of the inputs that a larger one may have
_KEPT = {"QuantizeLinear", "DequantizeLinear", "DynamicQuantizeLinear"}


@rule("*", phase=Phase.CLEAN, level=0)
def fold_constants(g: Graph, layer: Layer) -> list[Tensor] | Skip | None:
    given = [t for t in layer.inputs if t is not None]
    if layer.regions or layer.op in _KEPT or not all(t.is_constant for t in given) or not get_op(layer.op).pure:
        return None
    if layer.op == "Identity" and g.is_output(layer.output):
        return None  # how a constant is an output
    if not all(t.type.static for t in layer.outputs):
        return None  # an Expand to a symbolic batch
    if any(t.dtype.name == "string" for t in (*given, *layer.outputs)):
        return Skip("strings are not computed with")
    made = sum(t.type.nbytes for t in layer.outputs if isinstance(t.type.nbytes, int))
    had = sum(t.type.nbytes for t in given if isinstance(t.type.nbytes, int))
    if made > max(SMALL, GROWTH * had):
        return Skip(f"the constant would have {made} bytes, what it is computed from has {had}")
    arrays = run_layer(layer, [None if t is None else t.array() for t in layer.inputs])
    origins = tuple(None if t is None or t.weight is None else t.weight.origin for t in layer.inputs)
    attrs = tuple(sorted(layer.attrs.items()))
    found = []
    for t, a in zip(layer.outputs, arrays, strict=True):
        dense = np.array(a, order="C")  # a copy: a view would keep, or be, another weight
        found.append(g.constant(Weight(dense, Origin(layer.op, "", origins, attrs, t.index)), t.name))
    return found
