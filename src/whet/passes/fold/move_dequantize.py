"""Moves DequantizeLinear after layers that only move or select values (MaxPool, Transpose, Reshape, ..., a Concat of equal scales)."""

from __future__ import annotations

from whet.network import Layer, Tensor
from whet.passes._move_quantize import MOVES, add_on_integers, is_padding_exact, why_values_change
from whet.rewrite.graph import Graph
from whet.rewrite.quantization import find_dequantizer, find_scales, scale_inputs
from whet.rewrite.rules import Phase, Skip, rule


@rule(*MOVES, "Relu", "Concat", phase=Phase.FOLD, after=["quantize_weights", "fold_batch_norm"])
def move_dequantize(g: Graph, layer: Layer) -> Tensor | Skip | None:
    if layer.op == "Fused" or len(layer.outputs) != 1:
        return None
    data = layer.inputs if layer.op == "Concat" else layer.inputs[:1]
    makers = [find_dequantizer(g, t) for t in data]
    if not any(makers) or all(m is None or m.needs(0).is_constant for m in makers):
        return None
    if not all(makers):
        return Skip(f"only {sum(m is not None for m in makers)} of its {len(makers)} inputs are quantized")
    dequantizers = [m for m in makers if m is not None]
    scales = [find_scales(m) for m in dequantizers]
    first, dq = scales[0], dequantizers[0]
    x = dq.needs(0)
    if first is None or not first.per_tensor:
        return Skip(f"%{x.name} does not have one constant scale")
    if not dq.needs(1).array().reshape(-1)[0] > 0:
        return Skip(f"the scale of %{x.name} is not positive")
    if any(f != first for f in scales):
        return Skip("its inputs have different scales")
    if layer.op == "Relu" and first.zeros is not None:
        return Skip(f"the zero point of %{x.name} is not 0")
    if reason := why_values_change(layer):
        return Skip(reason)
    if not is_padding_exact(layer, dq.needs(1), dq.input(2)):
        return Skip(f"the padding value of '{layer.name}' is not an integer of %{x.name}")
    moved = add_on_integers(g, layer, *[m.needs(0) for m in dequantizers], rounding=dq)
    return g.add("DequantizeLinear", moved, *scale_inputs(dq))
