"""Replaces a layer with only constant inputs by a constant; its origin records the computation.

A layer with a result much larger than its inputs (an Expand of a scalar) is kept, to keep the engine small, unless the result is a weight,
also after further layers on constants: kernels need weights in advance. Arithmetic (the masks of shifted windows) is folded up to a larger size than
repetition: it would run again for every inference. Beyond that size one item is folded of a Where that is equal for all items. QuantizeLinear and
DequantizeLinear are kept because they give the storage type of a weight.
"""

from __future__ import annotations

import numpy as np

from whet.network import Layer, Origin, Tensor, Weight
from whet.ops import get_op, has_symbols, run_layer
from whet.rewrite.graph import Graph
from whet.rewrite.rules import Phase, Skip, rule

_SMALL = 1 << 16  # bytes: smaller constants are always folded
_COMPUTED = 1 << 23  # bytes: the same for results of arithmetic
_REPEATING = {"ConstantOfShape", "Expand", "Tile"}
_GROWTH = 2  # larger ones may have this many times the bytes of the inputs
_WEIGHT = 1 << 26  # bytes: the largest weight that is folded in spite of its growth
_WEIGHTED = {"BatchNormalization", "Conv", "ConvTranspose", "GRU", "Gemm", "LSTM", "MatMul", "RNN"}
_KEPT = {"QuantizeLinear", "DequantizeLinear", "DynamicQuantizeLinear"}


@rule("*", phase=Phase.CLEAN, level=0)
def fold_constants(g: Graph, layer: Layer) -> list[Tensor] | Skip | None:
    inputs = [t for t in layer.inputs if t is not None]
    if layer.regions or layer.op in _KEPT or not all(t.is_constant for t in inputs) or not get_op(layer.op).pure:
        return None
    if layer.op == "Identity" and g.is_output(layer.output):
        return None  # an Identity that makes a constant an output
    if has_symbols(layer) or not all(t.type.static for t in layer.outputs):
        return None  # for example an Expand to a symbolic batch
    if any(t.dtype.name == "string" for t in (*inputs, *layer.outputs)):
        return Skip("strings are not folded")
    output_bytes = sum(t.type.nbytes for t in layer.outputs if isinstance(t.type.nbytes, int))
    input_bytes = sum(t.type.nbytes for t in inputs if isinstance(t.type.nbytes, int))
    small = _SMALL if layer.op in _REPEATING else _COMPUTED
    if output_bytes > max(small, _GROWTH * input_bytes) and (output_bytes > _WEIGHT or not _is_weight(g, layer)):
        return _fold_equal_items(g, layer) or Skip(f"the constant would have {output_bytes} bytes, its inputs have {input_bytes}")
    if reason := g.budget.why_not(layer):
        return Skip(reason)
    arrays = run_layer(layer, [None if t is None else t.array() for t in layer.inputs])
    origins = tuple(None if t is None or t.weight is None else t.weight.origin for t in layer.inputs)
    attrs = tuple(sorted(layer.attrs.items()))
    constants = []
    for t, a in zip(layer.outputs, arrays, strict=True):
        dense = np.array(a, order="C")  # a copy: a view would keep the memory of another weight alive
        constants.append(g.constant(Weight(dense, Origin.of_operation(layer.op, origins, attrs, t.index, name=t.name)), t.name))
    return constants


def _fold_equal_items(g: Graph, layer: Layer) -> list[Tensor] | None:
    """The result of a Where that is the same for each item of a batch (a causal mask), as an Expand of that of one item; else None."""
    shape = layer.outputs[0].shape
    if layer.op != "Where" or len(shape) < 2 or not isinstance(shape[0], int) or shape[0] < 2:
        return None
    parts = []
    for t in layer.required_inputs():
        whole = t.type.rank == len(shape) and t.shape[0] != 1
        if whole and not np.array_equal(t.array()[1:], t.array()[:-1]):
            return None
        parts.append(g.add("Slice", t, axes=(0,), starts=(0,), ends=(1,), steps=(1,)) if whole else t)
    return [g.add("Expand", g.add("Where", *parts), shape=shape)]


def _is_weight(g: Graph, layer: Layer) -> bool:
    """True if the results of `layer` (its inputs are constants) are used as weights only, possibly after further layers on constants."""
    waiting, fixed = [layer], {layer}
    used = False
    while waiting:
        current = waiting.pop()
        for t in current.outputs:
            if g.is_output(t):
                return False
            for reader in g.readers(t):
                if reader in fixed:
                    continue
                if reader.op in _WEIGHTED and t is not reader.inputs[0]:
                    used = True
                elif not reader.regions and all(x is None or x.is_constant or x.maker in fixed for x in reader.inputs):
                    fixed.add(reader)
                    waiting.append(reader)
                else:
                    return False
    return used
