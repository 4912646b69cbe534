"""Matching a residual block's end: two convolutions, of which one adds the other's result."""

from __future__ import annotations

from whet.network import I8, U8, Layer, Tensor
from whet.rewrite.fusing import find_conv_weights, find_inner_conv, is_conv, list_epilogue_steps
from whet.rewrite.graph import Graph
from whet.rewrite.rules import Skip


def find_added_conv(g: Graph, layer: Layer, *, integers: bool) -> tuple[Tensor, Layer] | None:
    """(residual, its producer) when a fused convolution adds the result of a convolution whose epilogue is at most a bias; else None."""
    value = _find_residual(layer, integers=integers)
    first = g.maker(value)
    if value is None or first is None or not is_conv(first) or set(list_epilogue_steps(first)) - {"bias"}:
        return None
    return value, first


def match_conv_pair(first: Layer, last: Layer) -> tuple[Layer, Layer] | Skip:
    """The Convs of two convolution layers, or why they are not computed as one sum."""
    convs = find_inner_conv(first), find_inner_conv(last)
    return Skip("a convolution with groups is not summed with another one") if any(c.attrs["group"] != 1 for c in convs) else convs


def _find_residual(layer: Layer, *, integers: bool) -> Tensor | None:
    """The run-time value that a fused convolution adds to its accumulator: a float tensor, or integers that it dequantizes.

    None when there is no such value, or when the layer reads it more than once.
    """
    body = layer.regions["body"]
    outer = dict(zip(body.inputs, layer.inputs, strict=True))
    for x in body.layers:
        if x.op != "Add":
            continue
        if integers:
            makers = [None if t is None else t.maker for t in x.inputs]
            operands = [outer.get(m.needs(0)) for m in makers if m is not None and m.op == "DequantizeLinear"]
        else:
            operands = [outer[t] for t in x.inputs if t is not None and t in outer]
        t = operands[0] if len(operands) == 1 else None
        if t is not None and not t.is_constant and (t.dtype in (I8, U8) if integers else t.type == x.output.type):
            return t if sum(other is t for other in layer.inputs) == 1 else None
    return None


def is_unpadded_1x1(conv: Layer) -> bool:
    """True if a Conv is 1x1 without padding, of any stride."""
    w = find_conv_weights(conv)
    return w is not None and w.shape[2:] == (1, 1) and not any(conv.attrs.get("pads") or ())
