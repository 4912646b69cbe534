"""Moves QuantizeLinear before layers that only move or select values, towards the layer that can store integers directly."""

from __future__ import annotations

from whet.network import F8E4M3, Layer, Tensor
from whet.passes._move_quantize import MOVES, add_on_integers, why_values_change
from whet.rewrite.fusing import ACTIVATIONS
from whet.rewrite.graph import Graph
from whet.rewrite.quantization import WEIGHTED, find_dequantizer, find_scales, scale_inputs
from whet.rewrite.rules import Phase, Skip, rule


@rule("QuantizeLinear", phase=Phase.FOLD, after=["move_dequantize"])
def move_quantize(g: Graph, layer: Layer) -> Tensor | Skip | None:
    mover = g.maker(layer.inputs[0])
    if mover is None or mover.op not in (*MOVES, "Concat") or len(mover.outputs) != 1:
        return None
    data = mover.inputs if mover.op == "Concat" else mover.inputs[:1]
    if all(g.maker(t) is None for t in data):
        return None  # network inputs are quantized at their readers
    scales = find_scales(layer)
    if scales is None or not scales.per_tensor:
        return Skip(f"%{layer.output.name} does not have one constant scale")
    if reason := why_values_change(mover) or g.escapes(mover.output, layer):
        return Skip(reason)
    if mover.op == "MaxPool" and scales.dtype == F8E4M3 and not _can_store_integers(g, mover.inputs[0]):
        return Skip(f"%{mover.needs(0).name} is computed in floating point: after '{mover.name}' there are fewer values to round")
    attrs = {k: layer.attrs[k] for k in ("saturate", "output_dtype") if k in layer.attrs}
    quantized = [g.add("QuantizeLinear", t, *scale_inputs(layer), **attrs) for t in data if t is not None]
    return add_on_integers(g, mover, *quantized, rounding=layer)


def _can_store_integers(g: Graph, t: Tensor | None) -> bool:
    """True if the layer that produces `t`, before its activations, is a convolution or product with dequantized weights."""
    maker = g.maker(t)
    while maker is not None and maker.op in ACTIVATIONS:
        maker = g.maker(maker.inputs[0])
    return maker is not None and maker.op in WEIGHTED and find_dequantizer(g, maker.inputs[1]) is not None
