"""Two convolutions of which one adds the other's result: what the passes for sums of floats and of integers look at."""

from __future__ import annotations

from whet.network import I8, U8, Layer, Tensor
from whet.rewrite.rules import Skip
from whet.rewrite.fusing import anchored, conv_of, steps
from whet.rewrite.graph import Graph


def summand(g: Graph, layer: Layer, *, integers: bool) -> tuple[Tensor, Layer] | None:
    """What a fused convolution adds, and the convolution that makes it with nothing but a bias behind; None where there is no such thing."""
    value = added(layer, integers=integers)
    first = g.maker(value)
    if value is None or first is None or anchored(first, ("Conv",)) != "Conv" or set(steps(first)) - {"bias"}:
        return None
    return value, first


def both_convs(first: Layer, last: Layer) -> tuple[Layer, Layer] | Skip:
    """The convolutions in two fused layers, or why they are not computed as one sum."""
    heads = conv_of(first), conv_of(last)
    return Skip("a convolution of several groups has no sum with another") if any(h.attrs["group"] != 1 for h in heads) else heads


def added(layer: Layer, *, integers: bool) -> Tensor | None:
    """What a fused convolution adds to its sum and is computed at run time: floats as they are, or integers that it dequantizes.

    None when it adds nothing of the kind, or reads the same value elsewhere too.
    """
    body = layer.regions["body"]
    outer = dict(zip(body.inputs, layer.inputs, strict=True))
    for x in body.layers:
        if x.op != "Add":
            continue
        if integers:
            makers = [None if t is None else t.maker for t in x.inputs]
            found = [outer.get(m.inputs[0]) for m in makers if m is not None and m.op == "DequantizeLinear"]
        else:
            found = [outer[t] for t in x.inputs if t in outer]
        t = found[0] if len(found) == 1 else None
        if t is not None and not t.is_constant and (t.dtype in (I8, U8) if integers else t.type == x.output.type):
            return t if sum(other is t for other in layer.inputs) == 1 else None
    return None


def small(conv: Layer) -> bool:
    """Whether a convolution is 1x1 without padding."""
    w = conv.inputs[1]
    return w is not None and w.type.rank == 4 and w.shape[2:] == (1, 1) and not any(conv.attrs.get("pads") or ())
