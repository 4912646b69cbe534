"""DequantizeLinear moves behind layers that only move or select numbers (MaxPool, Transpose, Reshape, ..., a Concat of equal scales)."""

from __future__ import annotations

from whet.network import Layer, Tensor
from whet.passes._move_quantize import MOVES, again, mixes, pads_exactly
from whet.rewrite.graph import Graph
from whet.rewrite.quantization import dequantizer, scale_inputs, scales_of
from whet.rewrite.rules import Phase, Skip, rule


@rule(*MOVES, "Relu", "Concat", phase=Phase.FOLD, after=["quantize_weights", "fold_batch_norm"])
def move_dequantize(g: Graph, layer: Layer) -> Tensor | Skip | None:
    if layer.op == "Fused" or len(layer.outputs) != 1:
        return None
    data = layer.inputs if layer.op == "Concat" else layer.inputs[:1]
    makers = [dequantizer(g, t) for t in data]
    if not any(makers) or all(m is None or m.inputs[0].is_constant for m in makers):
        return None
    if not all(makers):
        return Skip(f"only {sum(m is not None for m in makers)} of its {len(makers)} inputs are quantized")
    dequantizers = [m for m in makers if m is not None]
    found = [scales_of(m) for m in dequantizers]
    first, dq = found[0], dequantizers[0]
    if first is None or not first.per_tensor:
        return Skip(f"%{dq.inputs[0].name} has not one scale that is known")
    if any(f != first for f in found):
        return Skip("its inputs have different scales")
    if layer.op == "Relu" and first.zeros is not None:
        return Skip(f"zero is not the integer 0 in %{dq.inputs[0].name}")
    if reason := mixes(layer):
        return Skip(reason)
    if not pads_exactly(layer, dq.inputs[1], dq.input(2)):
        return Skip(f"what '{layer.name}' pads with is no integer of %{dq.inputs[0].name}")
    moved = again(g, layer, *[m.needs(0) for m in dequantizers], rounding=dq)
    return g.add("DequantizeLinear", moved, *scale_inputs(dq))
