"""Two convolutions whose results are added become one layer: a residual block's last convolution and its projection shortcut.

The body keeps both as they were fused before, so that the layer can be taken apart into the same two.
"""

from __future__ import annotations

from whet.network import Layer, Tensor
from whet.passes._base import Phase, Skip, rule
from whet.passes._fuse import anchored, fuse_whole, obstacle, steps
from whet.passes._graph import Graph
from whet.passes._quantize import dequantizer

HINT = "ConvSum"


@rule("*", phase=Phase.FINAL)
def fuse_conv_sum(g: Graph, layer: Layer) -> Tensor | Skip | None:
    if layer.op != "Fused" or layer.hint != "Conv":
        return None
    value = _added(layer)
    first = g.maker(value)
    if value is None or first is None or anchored(first, ("Conv",)) != "Conv" or set(steps(first)) - {"bias"}:
        return None
    if reason := obstacle(g, first, value, layer):
        return Skip(reason)
    before = steps(layer)[: steps(layer).index("add")]
    if set(before) - {"bias"}:
        return Skip(f"%{value.name} is added behind the {before[-1]} of '{layer.name}'")
    heads = [_conv(first), _conv(layer)]
    if any(h.attrs["group"] != 1 for h in heads):
        return Skip("a convolution of several groups has no sum with another")
    if any(_quantized(g, x) for x in (first, layer)):
        return Skip("quantized weights: the convolutions compute in 8 bits, each by itself")
    if not any(_small(h) for h in heads):
        return Skip("neither convolution is 1x1 without padding")
    return fuse_whole(g, HINT, first, layer)


def _added(layer: Layer) -> Tensor | None:
    """What a fused convolution adds to its sum and is computed at run time; None when it adds nothing, or itself."""
    body = layer.regions["body"]
    outer = dict(zip(body.inputs, layer.inputs, strict=True))
    for x in body.layers:
        if x.op == "Add":
            found = [outer[t] for t in x.inputs if t in outer]
            if len(found) == 1 and found[0] is not None and not found[0].is_constant and found[0].type == x.output.type:
                return found[0] if sum(t is found[0] for t in layer.inputs) == 1 else None
    return None


def _quantized(g: Graph, layer: Layer) -> bool:
    """Whether a convolution computes in 8 bits, or is about to: its weights are dequantized."""
    if layer.op == "Fused" and any(x.op == "DequantizeLinear" for x in layer.regions["body"].layers):
        return True
    made = (dequantizer(g, t) for t in layer.inputs)
    return any(dq is not None and dq.inputs[0].is_constant for dq in made)


def _conv(layer: Layer) -> Layer:
    return layer if layer.op == "Conv" else next(x for x in layer.regions["body"].layers if x.op == "Conv")


def _small(conv: Layer) -> bool:
    """1x1 without padding."""
    w = conv.inputs[1]
    return w is not None and w.type.rank == 4 and w.shape[2:] == (1, 1) and not any(conv.attrs.get("pads") or ())
