"""Layers that quantization moves through: what they do to the numbers, they do to the integers."""

from __future__ import annotations

from typing import Any

from whet.network import Layer, Tensor
from whet.passes._graph import Graph

MOVES = ("DepthToSpace", "Flatten", "MaxPool", "Reshape", "Slice", "SpaceToDepth", "Squeeze", "Transpose", "Unsqueeze")


def again(g: Graph, layer: Layer, *values: Tensor | None) -> Any:
    """The layer once more, on integers: `values` in place of the inputs that carry data; shapes and axes stay."""
    rest = () if layer.op == "Concat" else layer.inputs[1:]
    return g.add(layer.op, *values, *rest, **layer.attrs)
