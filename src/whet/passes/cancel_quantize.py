"""Integers that are dequantized and quantized again with the same scale stay as they are."""

from __future__ import annotations

from whet.network import Layer, Tensor
from whet.passes._base import Phase, Skip, rule
from whet.passes._graph import Graph
from whet.passes._quantize import dequantizer, scales_of


@rule("QuantizeLinear", phase=Phase.FOLD, after=["move_dequantize", "move_quantize"])
def cancel_quantize(g: Graph, layer: Layer) -> Tensor | Skip | None:
    dq = dequantizer(g, layer.inputs[0])
    if dq is None:
        return None
    ours, theirs = scales_of(layer), scales_of(dq)
    if ours is None or theirs is None:
        return Skip("a scale is computed at run time")
    if ours != theirs:
        return Skip(f"%{dq.inputs[0].name} has another scale, zero point or type")  # type: ignore[union-attr]
    if ours.dtype.kind not in ("int", "uint"):
        return Skip(f"{ours.dtype} rounds again")
    return dq.inputs[0]
