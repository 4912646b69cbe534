"""Two quantized convolutions, of which one adds the other's integers, become one layer: a block's last convolution and its projection shortcut.

Both stay whole in the body: the first one's sums are rounded to its integers, which the second adds, but nothing is stored in between.
"""

from __future__ import annotations

from whet.network import I8, U8, Layer, Tensor
from whet.passes._base import Phase, Skip, rule
from whet.passes._fuse import anchored, conv_of, fuse_whole, steps
from whet.passes._graph import Graph

HINT = "QuantizedSum"


@rule("Fused", phase=Phase.FINAL, after=["fuse_conv_sum", "fuse_quantized_pool"])
def fuse_quantized_sum(g: Graph, layer: Layer) -> Tensor | Skip | None:
    if anchored(layer, ("Conv",)) != "Conv" or "add" not in steps(layer):
        return None
    value = _added_integers(layer)
    first = g.maker(value)
    if value is None or first is None or first.op != "Fused" or anchored(first, ("Conv",)) != "Conv" or set(steps(first)) - {"bias"}:
        return None
    if reason := g.shared(value, layer):
        return Skip(reason)
    heads = [conv_of(first), conv_of(layer)]
    if any(h.attrs["group"] != 1 for h in heads):
        return Skip("a convolution of several groups has no sum with another")
    w = heads[1].inputs[1]
    if w is None or w.type.rank != 4 or w.shape[2:] != (1, 1) or any(heads[1].attrs.get("pads") or ()):
        return Skip("what adds is no 1x1 convolution without padding")
    return fuse_whole(g, HINT, first, layer)


def _added_integers(layer: Layer) -> Tensor | None:
    """The integers that a fused quantized convolution adds to its sum; None when it adds none, or reads them as well."""
    body = layer.regions["body"]
    outer = dict(zip(body.inputs, layer.inputs, strict=True))
    for x in body.layers:
        if x.op == "Add":
            makers = [None if t is None else t.maker for t in x.inputs]
            found = [outer.get(m.inputs[0]) for m in makers if m is not None and m.op == "DequantizeLinear"]
            if len(found) == 1 and found[0] is not None and found[0].dtype in (I8, U8) and not found[0].is_constant:
                return found[0] if sum(t is found[0] for t in layer.inputs) == 1 else None
    return None
