"""A convolution or matrix product of dequantized values that is not quantized again computes in integers and stores floats."""

from __future__ import annotations

from whet.network import Layer, Tensor
from whet.passes._base import Phase, Skip, rule
from whet.passes._fuse import anchored, fuse
from whet.passes._graph import Graph
from whet.passes._quantize import WEIGHTED, quantized_members


@rule(*WEIGHTED, "Fused", phase=Phase.FINAL, level=0)
def fuse_dequantized(g: Graph, layer: Layer) -> Tensor | Skip | None:
    found = quantized_members(g, layer)
    if found is None:
        return None
    if isinstance(found, str):
        return Skip(found)
    return fuse(g, anchored(layer, WEIGHTED), *found, layer)
