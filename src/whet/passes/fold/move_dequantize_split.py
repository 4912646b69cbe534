"""DequantizeLinear moves behind a Split: the parts of the integers are the integers of the parts."""

from __future__ import annotations

from collections.abc import Sequence

from whet.network import Layer, Tensor
from whet.rewrite.graph import Graph
from whet.rewrite.quantization import dequantizer, scale_inputs, scales_of
from whet.rewrite.rules import Phase, Skip, rule


@rule("Split", phase=Phase.FOLD, after=["move_dequantize"])
def move_dequantize_split(g: Graph, layer: Layer) -> Sequence[Tensor] | Skip | None:
    dq = dequantizer(g, layer.inputs[0])
    if dq is None or dq.inputs[0].is_constant:
        return None
    found = scales_of(dq)
    if found is None or not found.per_tensor:
        return Skip(f"%{dq.inputs[0].name} has not one scale that is known")
    parts = g.add("Split", dq.inputs[0], *layer.inputs[1:], **layer.attrs)
    parts = parts if isinstance(parts, tuple) else (parts,)
    return [g.add("DequantizeLinear", p, *scale_inputs(dq)) for p in parts]
