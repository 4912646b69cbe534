"""Two quantized convolutions, of which one adds the other's integers, become one layer: a block's last convolution and its projection shortcut.

Both stay whole in the body: the first one's sums are rounded to its integers, which the second adds, but nothing is stored in between.
"""

from __future__ import annotations

from whet.network import Layer, Tensor
from whet.passes._base import Phase, Skip, rule
from whet.passes._fuse import anchored, fuse_whole, steps
from whet.passes._graph import Graph
from whet.passes._sums import both_convs, small, summand

KIND = "QuantizedSum"


@rule("Fused", phase=Phase.FINAL, after=["fuse_conv_sum", "fuse_quantized_pool"])
def fuse_quantized_sum(g: Graph, layer: Layer) -> Tensor | Skip | None:
    if anchored(layer, ("Conv",)) != "Conv" or "add" not in steps(layer):
        return None
    found = summand(g, layer, integers=True)
    if found is None:
        return None
    value, first = found
    if reason := g.shared(value, layer):
        return Skip(reason)
    heads = both_convs(first, layer)
    if isinstance(heads, Skip):
        return heads
    if not small(heads[1]):
        return Skip("what adds is no 1x1 convolution without padding")
    return fuse_whole(g, KIND, first, layer)
