"""Concats do not read parts without elements, and Splits do not write them.

The decomposition of ONNX's RotaryEmbedding splits off the elements that are not rotated, even if there are none.
"""

from __future__ import annotations

from collections.abc import Mapping

from whet.network import Layer, Tensor
from whet.ops import normalize_axis
from whet.rewrite.graph import Graph
from whet.rewrite.rules import Phase, Skip, rule


@rule("Concat", "Split", phase=Phase.CLEAN, after=["fold_shapes"])
def drop_empty_parts(g: Graph, layer: Layer) -> Tensor | Mapping[Tensor, Tensor] | Skip | None:
    parts = [t for t in (layer.inputs if layer.op == "Concat" else layer.outputs) if t is not None]
    axis = normalize_axis(layer.attrs["axis"], parts[0].type.rank)
    filled = [t for t in parts if t.shape[axis] != 0]
    if len(filled) == len(parts) or not filled:
        return None
    if layer.op == "Concat":
        return filled[0] if len(filled) == 1 else g.add("Concat", *filled, axis=axis)
    x = layer.inputs[0]
    read = next((t for t in parts if t.shape[axis] == 0 and (g.readers(t) or g.is_output(t))), None)
    if read is not None or x is None:
        return Skip(f"%{read.name} has no elements, but is read") if read is not None else None
    if len(filled) == 1:
        return {filled[0]: x}
    sizes = tuple(t.shape[axis] for t in filled)
    if not g.is_sized(sizes):
        return None
    return dict(zip(filled, g.add("Split", x, axis=axis, split=sizes), strict=True))
