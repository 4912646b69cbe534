"""Integers that are dequantized and quantized again with the same scale stay as they are."""

from __future__ import annotations

import numpy as np

from whet.network import F8E4M3, F32, Layer, Tensor
from whet.rewrite.graph import Graph
from whet.rewrite.quantization import dequantizer, scales_of
from whet.rewrite.rules import Phase, Skip, rule


@rule("QuantizeLinear", phase=Phase.FOLD, after=["move_dequantize", "move_quantize"])
def cancel_quantize(g: Graph, layer: Layer) -> Tensor | Skip | None:
    dq = dequantizer(g, layer.inputs[0])
    if dq is None:
        return None
    ours, theirs = scales_of(layer), scales_of(dq)
    if ours is None or theirs is None:
        return Skip("a scale is computed at run time")
    if ours != theirs:
        return Skip(f"%{dq.inputs[0].name} has another scale, zero point or type")
    if ours.dtype.kind not in ("int", "uint") and not _comes_back(layer, dq):
        return Skip(f"{ours.dtype} rounds again")
    return dq.inputs[0]


def _comes_back(layer: Layer, dq: Layer) -> bool:
    """Whether an e4m3 number times its scale, divided by it again, is the same e4m3 number: two roundings of f32 are far from half a step."""
    if dq.inputs[0].dtype != F8E4M3 or layer.inputs[0].dtype != F32 or not layer.attrs.get("saturate", 1):
        return False
    scale = np.abs(np.asarray(layer.inputs[1].array(), np.float64))
    return bool(np.all((scale > 2.0**-100) & (scale < 2.0**100)))
