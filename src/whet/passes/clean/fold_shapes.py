"""Folds sizes that are known before run time: shape inputs become attributes, and layers with known values become constants.

Reshape(x, Concat(Gather(Shape(x)), ...)) becomes Reshape(x, shape=(N, 12, 64)), for symbolic dims too; the chain is then dead.
"""

from __future__ import annotations

import numpy as np

from whet.network import Expr, Layer, Tensor
from whet.ops import OPS, find_known_values, is_data_sized
from whet.ops._origin import make_literal
from whet.rewrite.graph import Graph
from whet.rewrite.rules import Phase, rule

#: op -> {input index: the attribute that can hold its values}
SIZES = {
    "ConstantOfShape": {0: "shape"},
    "Expand": {1: "shape"},
    "Pad": {1: "pads", 3: "axes"},
    "Reshape": {1: "shape"},
    "Resize": {2: "scales", 3: "sizes"},
    "Slice": {1: "starts", 2: "ends", 3: "axes", 4: "steps"},
    "Split": {1: "split"},
    "Squeeze": {1: "axes"},
    "Tile": {1: "repeats"},
    "TopK": {1: "k"},
    "Unsqueeze": {1: "axes"},
    **{f"Reduce{kind}": {1: "axes"} for kind in ("L1", "L2", "LogSum", "LogSumExp", "Max", "Mean", "Min", "Prod", "Sum", "SumSquare")},
}


@rule("*", phase=Phase.CLEAN, level=0)
def fold_shapes(g: Graph, layer: Layer) -> Tensor | list[Tensor] | None:
    return _make_constants(g, layer) or _convert_sizes_to_attributes(g, layer)


def _make_constants(g: Graph, layer: Layer) -> list[Tensor] | None:
    """Constants for outputs with only known elements."""
    if layer.regions or any(t.shape_value is None or not t.type.static for t in layer.outputs):
        return None
    if any(isinstance(v, Expr) for t in layer.outputs for v in t.shape_value or ()):
        return None
    if any(g.is_output(t) for t in layer.outputs) and layer.op == "Identity":
        return None
    return [g.constant(make_literal(np.array(t.shape_value, t.dtype.numpy).reshape(t.shape)), t.name) for t in layer.outputs]


def _convert_sizes_to_attributes(g: Graph, layer: Layer) -> Tensor | list[Tensor] | None:
    """The layer with its known size inputs as attributes."""
    if layer.op not in SIZES or layer.op not in OPS or is_data_sized(layer):
        return None  # the symbols of sizes that depend on data have the layer's name
    inputs, attrs = list(layer.inputs), dict(layer.attrs)
    for i, name in SIZES[layer.op].items():
        t = layer.input(i)
        values = find_known_values(t)
        if t is not None and values is not None and name in OPS[layer.op].attrs and t.dtype.kind == "int" and g.is_sized(values):
            inputs[i], attrs[name] = None, values
    if inputs == list(layer.inputs):
        return None
    while inputs and inputs[-1] is None:
        inputs.pop()
    outputs = g.add(layer.op, *inputs, sources=layer.sources, **attrs)
    return outputs if isinstance(outputs, Tensor) else list(outputs)
