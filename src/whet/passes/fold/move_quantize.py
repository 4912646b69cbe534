"""QuantizeLinear moves before layers that only move or select numbers, towards the layer that can store integers at once."""

from __future__ import annotations

from whet.network import F8E4M3, Layer, Tensor
from whet.passes._move_quantize import MOVES, again, mixes
from whet.rewrite.fusing import ACTIVATIONS
from whet.rewrite.graph import Graph
from whet.rewrite.quantization import WEIGHTED, dequantizer, scale_inputs, scales_of
from whet.rewrite.rules import Phase, Skip, rule


@rule("QuantizeLinear", phase=Phase.FOLD, after=["move_dequantize"])
def move_quantize(g: Graph, layer: Layer) -> Tensor | Skip | None:
    mover = g.maker(layer.inputs[0])
    if mover is None or mover.op not in (*MOVES, "Concat") or len(mover.outputs) != 1:
        return None
    data = mover.inputs if mover.op == "Concat" else mover.inputs[:1]
    if all(g.maker(t) is None for t in data):
        return None  # what the caller feeds stays as it is until it is needed
    found = scales_of(layer)
    if found is None or not found.per_tensor:
        return Skip(f"%{layer.output.name} has not one scale that is known")
    if reason := mixes(mover) or g.escapes(mover.output, layer):
        return Skip(reason)
    if mover.op == "MaxPool" and found.dtype == F8E4M3 and not _stores(g, mover.inputs[0]):
        return Skip(f"what makes %{mover.inputs[0].name} computes in floating point: behind '{mover.name}' there is less to round")
    attrs = {k: layer.attrs[k] for k in ("saturate", "output_dtype") if k in layer.attrs}
    made = [g.add("QuantizeLinear", t, *scale_inputs(layer), **attrs) for t in data if t is not None]
    return again(g, mover, *made, rounding=layer)


def _stores(g: Graph, t: Tensor | None) -> bool:
    """Whether the layer that makes `t`, before its activations, multiplies dequantized numbers, so that it could store such."""
    maker = g.maker(t)
    while maker is not None and maker.op in ACTIVATIONS:
        maker = g.maker(maker.inputs[0])
    return maker is not None and maker.op in WEIGHTED and dequantizer(g, maker.inputs[1]) is not None
