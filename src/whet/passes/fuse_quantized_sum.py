"""Two quantized convolutions, of which one adds the other's integers, become one layer: a block's last convolution and its projection shortcut.

Both stay whole in the body: the first one's sums are rounded to its integers, which the second adds, but nothing is stored in between.
"""

from __future__ import annotations

from whet.network import Layer, Tensor
from whet.passes._base import Phase, Skip, rule
from whet.passes._fuse import anchored, conv_of, fuse_whole, steps
from whet.passes._graph import Graph
from whet.passes._sums import added, small

HINT = "QuantizedSum"


@rule("Fused", phase=Phase.FINAL, after=["fuse_conv_sum", "fuse_quantized_pool"])
def fuse_quantized_sum(g: Graph, layer: Layer) -> Tensor | Skip | None:
    if anchored(layer, ("Conv",)) != "Conv" or "add" not in steps(layer):
        return None
    value = added(layer, integers=True)
    first = g.maker(value)
    if value is None or first is None or first.op != "Fused" or anchored(first, ("Conv",)) != "Conv" or set(steps(first)) - {"bias"}:
        return None
    if reason := g.shared(value, layer):
        return Skip(reason)
    heads = [conv_of(first), conv_of(layer)]
    if any(h.attrs["group"] != 1 for h in heads):
        return Skip("a convolution of several groups has no sum with another")
    if not small(heads[1]):
        return Skip("what adds is no 1x1 convolution without padding")
    return fuse_whole(g, HINT, first, layer)
