"""Attention over one axis of batch and heads, split by a later Reshape, is computed with both axes.

[B * H, S, D] @ [B * H, D, S] -> [B * H, S, S] -> [B, H, S, S] (Bloom, torch.baddbmm): a mask of the batch is added to four axes, and the result is
multiplied with three again. The Reshapes move to the operands, next to those that merged the axes.
"""

from __future__ import annotations

from collections.abc import Sequence

from whet.network import Dim, Layer, Tensor
from whet.network.dims import product
from whet.passes._scores import are_scores, find_only_softmax
from whet.rewrite.graph import Graph
from whet.rewrite.matching import find_maker_of_op
from whet.rewrite.rules import Phase, Skip, rule

_ELEMENTWISE = ("Add", "Div", "Mul", "Where")


@rule("Reshape", "MatMul", phase=Phase.CLEAN, after=["cancel_reshapes", "fold_shapes"], level=2)
def unmerge_heads(g: Graph, layer: Layer) -> Tensor | Skip | None:
    return _unmerge_scores(g, layer) if layer.op == "Reshape" else _unmerge_result(g, layer)


def _unmerge_scores(g: Graph, layer: Layer) -> Tensor | Skip | None:
    """The Reshape that splits the first axis of scores moves above the layer that produces them."""
    x, y = layer.inputs[0], layer.output
    maker = g.maker(x)
    if x is None or maker is None or maker.op not in ("MatMul", *_ELEMENTWISE) or x.type.rank < 3 or not are_scores(g, x):
        return None
    if find_only_softmax(g, y, through=(*_ELEMENTWISE, "Cast")) is None:
        return None  # also if the axes are merged again before the softmax
    parts = tuple(y.shape[: y.type.rank - x.type.rank + 1])
    if len(parts) < 2 or tuple(y.shape[len(parts) :]) != tuple(x.shape[1:]) or product(parts) != x.shape[0]:
        return None
    if reason := g.escapes(x, layer):
        return Skip(reason)
    inputs = [_split(g, t, x, parts) for t in maker.inputs]
    if any(a is None and b is not None for a, b in zip(inputs, maker.inputs, strict=True)):
        return Skip(f"an operand of '{maker.name}' does not have the first axis of %{x.name}: {x.type}")
    return g.add(maker.op, *inputs, **maker.attrs)


def _split(g: Graph, t: Tensor | None, x: Tensor, parts: Sequence[Dim]) -> Tensor | None:
    """An operand of the layer that produces `x`, with its first axis split into `parts`; None if it has another first axis."""
    if t is None or t.type.rank < x.type.rank:
        return t
    if t.type.rank > x.type.rank or t.shape[0] not in (1, x.shape[0]):
        return None
    first = parts if t.shape[0] == x.shape[0] else (1,) * len(parts)
    shape = (*first, *t.shape[1:])
    return g.add("Reshape", t, shape=shape) if all(d != 0 for d in shape) and g.is_sized(shape) else None


def _unmerge_result(g: Graph, layer: Layer) -> Tensor | Skip | None:
    """MatMul(Reshape(p), v) becomes Reshape(MatMul(p, Reshape(v))) if the Reshape merges the first axes of a softmax."""
    merged, v = layer.inputs
    reshape = find_maker_of_op(g, merged, "Reshape")
    p = reshape.inputs[0] if reshape is not None else None
    if reshape is None or merged is None or p is None or v is None or merged.type.rank != v.type.rank or merged.type.rank < 3:
        return None
    if not _is_softmax(g, p) or v.is_constant or v.shape[0] != merged.shape[0]:
        return None
    parts = tuple(p.shape[: p.type.rank - merged.type.rank + 1])
    if len(parts) < 2 or tuple(p.shape[len(parts) :]) != tuple(merged.shape[1:]):
        return None
    if reason := g.escapes(merged, layer):
        return Skip(reason)
    shape = (*parts, *v.shape[1:])
    if any(d == 0 for d in (*shape, *layer.output.shape)) or not g.is_sized(shape):
        return Skip(f"the shape of %{v.name}: {v.type} is not known")
    product_ = g.add("MatMul", p, g.add("Reshape", v, shape=shape), name=layer.name, sources=layer.sources)
    return g.add("Reshape", product_, shape=tuple(layer.output.shape))


def _is_softmax(g: Graph, t: Tensor) -> bool:
    """True for the result of a Softmax, also with the guard that exporters write for hidden rows."""
    layer = g.maker(t)
    if layer is not None and layer.op == "Where":
        layer = g.maker(layer.inputs[2])
    return layer is not None and layer.op == "Softmax"
