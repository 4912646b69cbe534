"""Two convolutions whose results are added become one layer: a residual block's last convolution and its projection shortcut.

The body keeps both as they were fused before, so that the layer can be taken apart into the same two.
"""

from __future__ import annotations

from whet.network import Layer, Tensor
from whet.passes._base import Phase, Skip, rule
from whet.passes._fuse import fuse_whole, obstacle, steps
from whet.passes._graph import Graph
from whet.passes._quantize import dequantizer
from whet.passes._sums import both_convs, small, summand

KIND = "ConvSum"


@rule("*", phase=Phase.FINAL)
def fuse_conv_sum(g: Graph, layer: Layer) -> Tensor | Skip | None:
    if layer.op != "Fused" or layer.composite != "Conv":
        return None
    found = summand(g, layer, integers=False)
    if found is None:
        return None
    value, first = found
    if reason := obstacle(g, first, value, layer):
        return Skip(reason)
    before = steps(layer)[: steps(layer).index("add")]
    if set(before) - {"bias"}:
        return Skip(f"%{value.name} is added behind the {before[-1]} of '{layer.name}'")
    heads = both_convs(first, layer)
    if isinstance(heads, Skip):
        return heads
    if any(_quantized(g, x) for x in (first, layer)):
        return Skip("quantized weights: the convolutions compute in 8 bits, each by itself")
    if not any(small(h) for h in heads):
        return Skip("neither convolution is 1x1 without padding")
    return fuse_whole(g, KIND, first, layer)


def _quantized(g: Graph, layer: Layer) -> bool:
    """Whether a convolution computes in 8 bits, or is about to: its weights are dequantized."""
    if layer.op == "Fused" and any(x.op == "DequantizeLinear" for x in layer.regions["body"].layers):
        return True
    made = (dequantizer(g, t) for t in layer.inputs)
    return any(dq is not None and dq.inputs[0].is_constant for dq in made)
