"""A mask or bias that is added to a reshaped view of attention's scores is added to the scores as they are.

Swin adds a mask per window to a view of five axes; with several images the mask repeats along the batch: a Tile. Kernels of attention index it.
Decomposed relative positions (SAM, MViT) add one bias per row and one per column to a view with two axes for each axis of the image: their sum is
reshaped, not the scores.
"""

from __future__ import annotations

from collections.abc import Sequence

from whet.network import Dim, Layer, Tensor
from whet.network.dims import product
from whet.network.types import static_shape
from whet.ops._strided import RESHAPES
from whet.passes._scores import are_scores, only_feeds_softmax
from whet.rewrite.constants import reshape_weight
from whet.rewrite.graph import Graph
from whet.rewrite.matching import find_interior_escape, find_maker_of_op
from whet.rewrite.rules import Phase, Skip, rule


@rule("Reshape", phase=Phase.CLEAN, after=["fold_shapes"], level=2)
def unreshape_masks(g: Graph, layer: Layer) -> Tensor | Skip | None:
    add = find_maker_of_op(g, layer.inputs[0], "Add")
    if add is None or not only_feeds_softmax(g, layer.output):
        return None
    for value, mask in (add.inputs, add.inputs[::-1]):
        view = g.maker(value)
        scores = view.inputs[0] if view is not None and view.op in RESHAPES else None
        if view is None or scores is None or mask is None or value is None or scores.type != layer.output.type or not are_scores(g, scores):
            continue
        groups = find_split_axes(value.shape, scores.shape)
        if value.type != add.output.type or groups is None:
            return Skip(f"%{mask.name}: {mask.type} is not added to a view of %{scores.name}: {scores.type}")
        if not g.is_sized((*value.shape, *mask.shape)):
            return Skip(f"the shape of %{mask.name}: {mask.type} is not known")
        if reason := find_interior_escape(g, layer, [view, add]):
            return Skip(reason)
        return g.add("Add", scores, _as_seen(g, mask, value.shape, groups))
    return None


def find_split_axes(view: Sequence[Dim], shape: Sequence[Dim]) -> list[list[int]] | None:
    """The axes of the view into which each axis of `shape` is split; None if the view merges axes."""
    groups: list[list[int]] = []
    at = 0
    for size in shape:
        group: list[int] = []
        while at < len(view) and (not group or product(view[i] for i in group) != size):
            group.append(at)
            at += 1
        if not group or product(view[i] for i in group) != size:
            return None
        groups.append(group)
    if any(view[i] != 1 for i in range(at, len(view))):
        return None
    groups[-1] += range(at, len(view))
    return groups


def _as_seen(g: Graph, mask: Tensor, view: Sequence[Dim], groups: Sequence[Sequence[int]]) -> Tensor:
    """The mask of a view, reshaped to broadcast to the scores: each axis has size 1 or that of the scores."""
    rank = len(view)
    dims: list[Dim] = [*(1,) * (rank - mask.type.rank), *mask.shape]
    expanded = list(dims)
    repeats: Dim = 1
    for k, group in enumerate(groups):
        own = [dims[i] for i in group]
        whole = [view[i] for i in group]
        if all(d == 1 for d in own) or own == whole:
            continue
        ones = next(n for n, d in enumerate(own) if d != 1)
        if k == 0 and own[ones:] == whole[ones:]:
            repeats = product(whole[:ones])
            continue
        for i in group:
            expanded[i] = view[i]
    shape = tuple(product(expanded[i] for i in group) for group in groups)
    if expanded != dims:
        mask = g.add("Expand", g.add("Reshape", mask, shape=tuple(dims)) if len(dims) != mask.type.rank else mask, shape=tuple(expanded))
    if mask.weight is not None:
        flat = g.constant(reshape_weight(mask.weight, static_shape(shape)), mask.name)
    else:
        flat = mask if tuple(mask.shape) == shape else g.add("Reshape", mask, shape=shape)
    return flat if repeats == 1 else g.add("Tile", flat, repeats=(repeats, *[1] * (len(shape) - 1)))
