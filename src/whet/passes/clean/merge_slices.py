"""Two successive Slices along different axes become one, so that the values are copied once."""

from __future__ import annotations

from whet.network import Layer, Tensor
from whet.ops import find_given_dims, normalize_axis
from whet.rewrite.graph import Graph
from whet.rewrite.rules import Phase, Skip, rule

_NAMES = ("starts", "ends", "axes", "steps")


@rule("Slice", phase=Phase.CLEAN, after=["fold_shapes"])
def merge_slices(g: Graph, layer: Layer) -> Tensor | Skip | None:
    x = layer.inputs[0]
    first = g.maker(x)
    if x is None or first is None or first.op != "Slice":
        return None
    if any(t is not None for t in (*layer.inputs[1:], *first.inputs[1:])):
        return None  # the bounds are computed at run time
    own, inner = _get_bounds(layer), _get_bounds(first)
    if set(own[2]) & set(inner[2]):
        return Skip(f"'{first.name}' slices the same axis")
    if reason := g.escapes(x, layer):
        return Skip(reason)
    bounds = {name: a + b for name, a, b in zip(_NAMES, inner, own, strict=True)}
    return g.add("Slice", first.inputs[0], **bounds)


def _get_bounds(layer: Layer) -> tuple[tuple, ...]:
    """starts, ends, axes (non-negative) and steps, without defaults."""
    starts, ends, axes, steps = (find_given_dims(layer, name, i) for i, name in enumerate(_NAMES, 1))
    starts, ends = starts or (), ends or ()
    rank = layer.output.type.rank
    axes_ = tuple(range(len(starts))) if axes is None else tuple(normalize_axis(a, rank) for a in axes if isinstance(a, int))
    return starts, ends, axes_, (1,) * len(starts) if steps is None else steps
