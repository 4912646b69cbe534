"""Moves a Transpose below a sum or product of operands that are all transposed alike, and below products with constant weights along the last axis.

Residual branches of convolutional networks with LayerNorm are transposed to images and added there: below the sum the Transpose meets the next one,
and the sum can be the epilogue of the linear layer before it. Attention of `[S, B, C]` transposes its sequences before the projections and back
after them. Cosine attention divides queries and keys by their lengths, reduced along the last axis: below that, the Transpose meets attention.
"""

from __future__ import annotations

import numpy as np

from whet.network import Layer, Tensor
from whet.ops._origin import express
from whet.ops._reduce import list_reduced_axes
from whet.rewrite.constants import reshape_weight
from whet.rewrite.graph import Graph
from whet.rewrite.matching import find_maker_of_op
from whet.rewrite.rules import Phase, Skip, rule

_REDUCTIONS = ("ReduceL2", "ReduceMean", "ReduceSum", "ReduceSumSquare")
_UNARY = ("Abs", "Clip", "Reciprocal", "Sqrt")


@rule(
    "Add", "Div", "Mul", "Sub", "MatMul", *_REDUCTIONS, *_UNARY,
    phase=Phase.CLEAN,
    after=["cancel_transposes", "fold_shapes", "drop_no_ops", "move_transposes"],
)  # fmt: skip
def sink_transposes(g: Graph, layer: Layer) -> Tensor | Skip | None:
    if layer.op in _REDUCTIONS or layer.op in _UNARY:
        return _sink_below_reduction(g, layer)
    transposes = [t.maker for t in layer.inputs if find_maker_of_op(g, t, "Transpose") is not None and t is not None and t.maker is not None]
    constants = [t for t in layer.inputs if t is not None and t.is_constant]
    if len(transposes) == 1 and not constants and layer.op == "Add":
        return _sink_below_residual(g, layer, transposes[0])
    if not transposes or len(transposes) + len(constants) != len(layer.inputs):
        return None
    perm = tuple(transposes[0].attrs["perm"])
    if layer.op == "MatMul":
        return _sink_below_product(g, layer, perm)
    if any(tuple(t.attrs["perm"]) != perm or not _is_whole_or_reduced(t.output, layer.output) for t in transposes):
        return None
    if any(t.type.rank > len(perm) or sum(d != 1 for d in t.shape) != 1 for t in constants):
        return None  # vectors along one axis alone: they can become a part of the layer before the Transpose
    if all(len(g.readers(t.output)) > 1 or g.is_output(t.output) for t in transposes):
        return Skip(f"all of {', '.join(repr(t.name) for t in transposes)} are read elsewhere too")
    back = tuple(int(i) for i in np.argsort(perm))

    def get_untransposed(t: Tensor | None) -> Tensor | None:
        if t is None or t.weight is None:
            return t.maker.inputs[0] if t is not None and t.maker is not None else None
        if t.type.rank <= 1 and perm[-1] == len(perm) - 1:
            return t  # a vector along the last axis, which stays
        full = reshape_weight(t.weight, (1,) * (len(perm) - t.type.rank) + t.weight.array.shape)
        return g.constant(express("Transpose", full, perm=back), t.name)

    value = g.add(layer.op, *map(get_untransposed, layer.inputs), name=layer.name, sources=layer.sources, **layer.attrs)
    return g.add("Transpose", value, perm=perm)


def _is_whole_or_reduced(t: Tensor, y: Tensor) -> bool:
    """True if `t` has the type of `y`, perhaps with one value along the last axis."""
    return t.dtype == y.dtype and (t.type == y.type or tuple(t.shape) == (*y.shape[:-1], 1))


def _sink_below_reduction(g: Graph, layer: Layer) -> Tensor | None:
    """Below a reduction along the last axis, which the Transpose keeps, and below functions of its result."""
    transpose = find_maker_of_op(g, layer.inputs[0], "Transpose")
    if transpose is None:
        return None
    perm, last = tuple(transpose.attrs["perm"]), layer.needs(0).type.rank - 1
    if perm[last] != last or any(t is not None and not t.is_constant for t in layer.inputs[1:]):
        return None
    if layer.op in _REDUCTIONS:
        if tuple(list_reduced_axes(layer)) != (last,) or not layer.attrs["keepdims"]:
            return None
    elif layer.output.shape[last] != 1:
        return None
    value = g.add(layer.op, transpose.inputs[0], *layer.inputs[1:], name=layer.name, sources=layer.sources, **layer.attrs)
    return g.add("Transpose", value, perm=perm)


def _sink_below_residual(g: Graph, layer: Layer, transpose: Layer) -> Tensor | Skip | None:
    """Below the sum of a linear layer's transposed result and a residual, which is transposed back: the sum can be the linear layer's epilogue."""
    y, perm = transpose.needs(0), tuple(transpose.attrs["perm"])
    if not _is_linear(g, y):
        return None
    residual = layer.inputs[0] if layer.inputs[1] is transpose.output else layer.inputs[1]
    if residual is None or residual.type != layer.output.type or transpose.output.type != layer.output.type:
        return None
    if _is_linear(g, residual):
        return None  # the sum can be the epilogue of that one, and would be moved back
    if reason := g.escapes(transpose.output, layer):
        return Skip(reason)
    back = tuple(int(i) for i in np.argsort(perm))
    value = g.add("Add", y, g.add("Transpose", residual, perm=back), name=layer.name, sources=layer.sources)
    return g.add("Transpose", value, perm=perm)


def _sink_below_product(g: Graph, layer: Layer, perm: tuple[int, ...]) -> Tensor | Skip | None:
    x, weights = layer.inputs
    last = len(perm) - 1
    if x is None or x.maker is None or weights is None or not weights.is_constant or weights.type.rank != 2 or perm[last] != last:
        return None
    if reason := g.escapes(x, layer):
        return Skip(reason)
    return g.add("Transpose", g.add("MatMul", x.maker.inputs[0], weights, name=layer.name, sources=layer.sources), perm=perm)


def _is_linear(g: Graph, t: Tensor | None) -> bool:
    """True for the result of a product with constant weights, also after a bias and a factor."""
    for _ in range(3):
        layer = g.maker(t)
        if layer is None or layer.op not in ("Add", "Mul", "MatMul"):
            return False
        constants = [x for x in layer.inputs if x is not None and x.is_constant]
        if len(constants) != 1:
            return False
        if layer.op == "MatMul":
            return layer.inputs[1] in constants
        t = layer.inputs[0] if layer.inputs[1] in constants else layer.inputs[1]
    return False
