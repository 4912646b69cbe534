"""Two Slices in a row along different axes become one, so that the values are moved once."""

from __future__ import annotations

from whet.network import Layer, Tensor
from whet.ops import axis_of, given
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
        return None  # its bounds are no attributes
    own, before = _bounds(layer), _bounds(first)
    if set(own[2]) & set(before[2]):
        return Skip(f"'{first.name}' cuts the same axis")
    if reason := g.escapes(x, layer):
        return Skip(reason)
    joined = {name: a + b for name, a, b in zip(_NAMES, before, own, strict=True)}
    return g.add("Slice", first.inputs[0], **joined)


def _bounds(layer: Layer) -> tuple[tuple, ...]:
    """starts, ends, axes (from the front) and steps, all given."""
    starts, ends, axes, steps = (given(layer, name, i) for i, name in enumerate(_NAMES, 1))
    starts, ends = starts or (), ends or ()
    rank = layer.output.type.rank
    places = tuple(range(len(starts))) if axes is None else tuple(axis_of(int(a), rank) for a in axes)
    return starts, ends, places, (1,) * len(starts) if steps is None else steps
