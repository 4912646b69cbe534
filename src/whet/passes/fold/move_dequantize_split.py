"""Moves DequantizeLinear after a Split, which then splits the integers."""

from __future__ import annotations

from collections.abc import Sequence

from whet.network import Layer, Tensor
from whet.rewrite.graph import Graph
from whet.rewrite.quantization import find_dequantizer, find_scales, scale_inputs
from whet.rewrite.rules import Phase, Skip, rule


@rule("Split", phase=Phase.FOLD, after=["move_dequantize"])
def move_dequantize_split(g: Graph, layer: Layer) -> Sequence[Tensor] | Skip | None:
    dq = find_dequantizer(g, layer.inputs[0])
    x = None if dq is None else dq.needs(0)
    if dq is None or x is None or x.is_constant:
        return None
    scales = find_scales(dq)
    if scales is None or not scales.per_tensor:
        return Skip(f"%{x.name} does not have one constant scale")
    parts = g.add("Split", x, *layer.inputs[1:], **layer.attrs)
    parts = parts if isinstance(parts, tuple) else (parts,)
    return [g.add("DequantizeLinear", p, *scale_inputs(dq)) for p in parts]
