"""Softmax attention, MatMul(Softmax(scale * MatMul(q, k) + mask), v), becomes one Fused layer hinted Attention.

Scale (Mul or Div by a number) and mask (Add) may be absent. k comes in as it is multiplied: transposed.
"""

from __future__ import annotations

from whet.network import Layer, Tensor
from whet.passes._base import Phase, Skip, rule
from whet.passes._fuse import anchored, fuse, steps
from whet.passes._graph import Graph
from whet.passes._match import made_by, private
from whet.passes._weights import scalar


@rule("MatMul", phase=Phase.FUSE, level=2)
def recognize_attention(g: Graph, layer: Layer) -> Tensor | Skip | None:
    softmax = made_by(g, layer.inputs[0], "Softmax")
    if softmax is None or not layer.output.dtype.is_float:
        return None
    x = softmax.inputs[0]
    if softmax.attrs["axis"] not in (-1, softmax.output.type.rank - 1):
        return Skip(f"the softmax is over axis {softmax.attrs['axis']}, not the last one")
    members = [softmax]
    for op in ("mask", "scale"):
        found = _mask(g, x) if op == "mask" else _scale(g, x)
        if found is not None:
            members.insert(0, found[0])
            x = found[1]
    scores = _product(g, x)
    if scores is None:
        return None
    if reason := private(g, layer, [scores, *members]):
        return Skip(reason)
    return fuse(g, "Attention", scores, *members, layer)


def _product(g: Graph, x: Tensor | None) -> Layer | None:
    """The MatMul that makes `x`, with its scale already in it or not."""
    layer = g.maker(x)
    return layer if layer is not None and anchored(layer, ("MatMul",)) and steps(layer) in ([], ["scale"]) else None


def _mask(g: Graph, x: Tensor | None) -> tuple[Layer, Tensor] | None:
    """(the Add, the scores in it), when `x` is scores + mask."""
    add = made_by(g, x, "Add")
    if add is None or x is None:
        return None
    for value in add.inputs:
        inner = _scale(g, value)
        if value is not None and value.type == x.type and _product(g, inner[1] if inner else value):
            return add, value
    return None


def _scale(g: Graph, x: Tensor | None) -> tuple[Layer, Tensor] | None:
    """(the Mul or Div, the scores in it), when `x` is scores times a number."""
    layer = g.maker(x)
    if layer is None or x is None or layer.op not in ("Mul", "Div"):
        return None
    pairs = (layer.inputs, layer.inputs[::-1]) if layer.op == "Mul" else (layer.inputs,)
    return next(((layer, v) for v, number in pairs if v is not None and scalar(number) is not None and v.type == x.type), None)
