"""Removes Expands before elementwise layers (these broadcast by themselves), or moves them after layers that need them.

torch writes normalizations by a length so: q / q.norm(dim=-1, keepdim=True).clamp_min(eps).expand_as(q). A mask that is expanded first is computed
for its own values and expanded for each reader; most readers broadcast it.
"""

from __future__ import annotations

from collections.abc import Sequence

from whet.network import Dim, Layer, Tensor
from whet.ops._reduce import list_reduced_axes
from whet.rewrite.graph import Graph
from whet.rewrite.matching import find_maker_of_op
from whet.rewrite.rules import Phase, Skip, rule

_OPS = ("Add", "And", "Cast", "Div", "Equal", "Greater", "Less", "Max", "Min", "Mul", "Not", "Or", "Pow", "Sub", "Where")
_REDUCTIONS = ("ReduceMax", "ReduceMin")


@rule(*_OPS, *_REDUCTIONS, phase=Phase.CLEAN, after=["drop_no_ops", "fold_shapes"])
def drop_expands(g: Graph, layer: Layer) -> Tensor | Skip | None:
    expands = [find_maker_of_op(g, t, "Expand") for t in layer.inputs]
    if not any(expands):
        return None
    if layer.op in _REDUCTIONS:
        return _reduce_first(g, layer, expands[0])
    inputs = [t if e is None else e.inputs[0] for t, e in zip(layer.inputs, expands, strict=True)]
    shape = _broadcast([t.shape for t in inputs if t is not None])
    if shape is None:
        return None
    same = shape == tuple(layer.output.shape)
    if not same and (any(d == 0 for d in layer.output.shape) or not g.is_sized(layer.output.shape)):
        return Skip(f"the shape of %{layer.output.name}: {layer.output.type} is not known")
    value = g.add(layer.op, *inputs, name=layer.name, sources=layer.sources, **layer.attrs)
    return value if same else g.add("Expand", value, shape=tuple(layer.output.shape))


def _reduce_first(g: Graph, layer: Layer, expand: Layer | None) -> Tensor | None:
    """The reduction of the value before an Expand of other axes, expanded afterwards."""
    value, x = layer.inputs[0], None if expand is None else expand.inputs[0]
    if x is None or value is None or x.type.rank != value.type.rank or not layer.attrs.get("keepdims", 1) or len(layer.inputs) > 1:
        return None
    if any(x.shape[axis] != value.shape[axis] for axis in list_reduced_axes(layer)) or not g.is_sized(layer.output.shape):
        return None
    reduced = g.add(layer.op, x, name=layer.name, sources=layer.sources, **layer.attrs)
    return g.add("Expand", reduced, shape=tuple(layer.output.shape))


def _broadcast(shapes: Sequence[Sequence[Dim]]) -> tuple[Dim, ...] | None:
    """The common shape; None if two sizes of an axis differ."""
    rank = max(map(len, shapes))
    sizes = [{s[i - rank] for s in shapes if len(s) >= rank - i} - {1} for i in range(rank)]
    return None if any(len(axis) > 1 for axis in sizes) else tuple(next(iter(axis), 1) for axis in sizes)
