"""Scores of attention that are replaced by -infinity or a very low value where a mask is false become scores plus a mask.

PyTorch's masked_fill and where(mask, scores, finfo.min) are exported as Where. A probability after the softmax is 0 either way. Rows without
a visible key keep their result: NaN for -infinity, equal probabilities for the lowest value of f32 and bf16, in which any score is lost. Other low
values are taken only where a constant mask hides no whole row.
"""

from __future__ import annotations

import numpy as np

from whet.network import Layer, Tensor
from whet.ops import run_layer
from whet.ops._origin import make_literal
from whet.passes._scores import are_scores, find_only_softmax
from whet.rewrite.constants import scalar_value
from whet.rewrite.graph import Graph
from whet.rewrite.rules import Phase, Skip, rule

_ABSORBS = -1e30  # of f32: a score next to it is lost
_HIDES = -1e4  # next to ordinary scores: exp of the difference is 0


@rule("Where", phase=Phase.CLEAN, after=["fold_constants", "fold_shapes"], level=2)
def masked_fill_to_add(g: Graph, layer: Layer) -> Tensor | Skip | None:
    condition, yes, no = layer.inputs
    fill, shown = (yes, False) if scalar_value(yes) is not None else (no, True)
    scores = no if fill is yes else yes
    value = scalar_value(fill)
    if condition is None or scores is None or fill is None or value is None or not scores.dtype.is_float:
        return None
    softmax = find_only_softmax(g, layer.output) if are_scores(g, scores) else None
    if softmax is None:
        return None
    if scores.type != layer.output.type:
        return Skip(f"the mask %{condition.name}: {condition.type} broadcasts the scores %{scores.name}: {scores.type}")
    absorbs = value == -np.inf or (value <= _ABSORBS and scores.dtype.name in ("f32", "bf16", "f64"))
    shows = _has_keys_last(softmax, scores) and _shows_a_key_in_each_row(condition, shown)
    if not absorbs and not (value <= _HIDES and shows):
        return Skip(f"scores are set to {value:g}: rows of which every key is hidden would change")
    zero = g.constant(make_literal(np.array(0.0), scores.dtype), "zero")
    low = g.constant(make_literal(np.array(value), scores.dtype), "low")
    mask = g.add("Where", condition, *((zero, low) if shown else (low, zero)))
    if condition.is_constant and isinstance(mask.type.nbytes, int):
        (array,) = run_layer(mask.maker, [t.array() for t in mask.maker.inputs])
        mask = g.constant(make_literal(np.ascontiguousarray(array), scores.dtype), "mask")
    return g.add("Add", scores, mask)


def _has_keys_last(softmax: Layer, scores: Tensor) -> bool:
    """True if the softmax is over the last axis of the scores: over their keys."""
    x = softmax.needs(0)
    return softmax.attrs["axis"] % x.type.rank == x.type.rank - 1 and x.shape[-1] == scores.shape[-1]


def _shows_a_key_in_each_row(condition: Tensor, shown: bool) -> bool:
    """True if a constant mask shows a key in every row."""
    return condition.is_constant and condition.type.rank > 0 and bool((condition.array() == shown).any(axis=-1).all())
