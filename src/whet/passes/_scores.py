"""Scores of attention: the result of a matrix product of two activations on its way into a softmax."""

from __future__ import annotations

from collections.abc import Collection

from whet.network import Layer, Tensor
from whet.rewrite.constants import scalar_value
from whet.rewrite.graph import Graph

_MOST_STEPS = 8


def are_scores(g: Graph, t: Tensor | None) -> bool:
    """True if `t` is a product of two activations, perhaps scaled, masked and reshaped."""
    return _is_product_within(g, t, _MOST_STEPS)


def _is_product_within(g: Graph, t: Tensor | None, steps: int) -> bool:
    layer = g.maker(t)
    if layer is None or steps == 0:
        return False
    if layer.op in ("MatMul", "Einsum"):
        return len(layer.inputs) == 2 and not any(x is None or x.is_constant for x in layer.inputs)
    if layer.op in ("Mul", "Div"):
        return any(scalar_value(x) is not None for x in layer.inputs) and any(_is_product_within(g, x, steps - 1) for x in layer.inputs)
    if layer.op == "Add":
        return any(x is not None and x.type == layer.output.type and _is_product_within(g, x, steps - 1) for x in layer.inputs)
    return layer.op in ("Reshape", "Unsqueeze", "Squeeze") and _is_product_within(g, layer.inputs[0], steps - 1)


def find_only_softmax(g: Graph, t: Tensor, through: Collection[str] = ("Add", "Reshape", "Unsqueeze", "Squeeze", "Where", "Cast")) -> Layer | None:
    """The Softmax that is the only reader of `t`, through layers of these operations; None if there are other readers."""
    for _ in range(_MOST_STEPS):
        readers = g.readers(t)
        if g.is_output(t) or len(readers) != 1:
            return None
        (reader,) = readers
        if reader.op == "Softmax":
            return reader if reader.inputs[0] is t else None
        if reader.op not in through:
            return None
        t = reader.output
    return None


def only_feeds_softmax(g: Graph, t: Tensor) -> bool:
    """True if the only reader of `t`, through layers that keep or move its values, is a Softmax."""
    return find_only_softmax(g, t) is not None


def split_scores(g: Graph, add: Layer) -> tuple[Tensor, Tensor] | None:
    """(scores, what is added to them), when `add` adds a mask or bias to scores without changing their type; None otherwise."""
    for scores, mask in (add.inputs, add.inputs[::-1]):
        if scores is not None and mask is not None and scores.type == add.output.type and are_scores(g, scores) and not are_scores(g, mask):
            return scores, mask
    return None
