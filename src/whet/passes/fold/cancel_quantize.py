"""Removes a DequantizeLinear followed by a QuantizeLinear with equal scales."""

from __future__ import annotations

import numpy as np

from whet.network import F8E4M3, F32, Layer, Tensor
from whet.rewrite.graph import Graph
from whet.rewrite.quantization import find_dequantizer, find_scales
from whet.rewrite.rules import Phase, Skip, rule


@rule("QuantizeLinear", phase=Phase.FOLD, after=["move_dequantize", "move_quantize"])
def cancel_quantize(g: Graph, layer: Layer) -> Tensor | Skip | None:
    dq = find_dequantizer(g, layer.inputs[0])
    if dq is None:
        return None
    x = dq.needs(0)
    ours, theirs = find_scales(layer), find_scales(dq)
    if ours is None or theirs is None:
        return Skip("a scale is computed at run time")
    if ours != theirs:
        return Skip(f"%{x.name} has another scale, zero point or type")
    if ours.dtype.kind not in ("int", "uint") and not _round_trips(layer, dq):
        return Skip(f"{ours.dtype} values are rounded again")
    return x


def _round_trips(layer: Layer, dq: Layer) -> bool:
    """True if an e4m3 value times its scale, divided by it again, is the same e4m3 value: two f32 roundings are far below half an e4m3 step."""
    if dq.needs(0).dtype != F8E4M3 or layer.needs(0).dtype != F32 or not layer.attrs.get("saturate", 1):
        return False
    scale = np.abs(np.asarray(layer.needs(1).array(), np.float64))
    return bool(np.all((scale > 2.0**-100) & (scale < 2.0**100)))
