"""The mask of shifted windows is added to scores [batch * windows, heads, rows, keys] directly, not to a view of five axes.

Swin adds a mask per window through two reshapes. With several images the mask repeats along the batch: a Tile, which kernels of attention index.
"""

from __future__ import annotations

from whet.network import Layer, Tensor
from whet.passes._scores import are_scores, only_feeds_softmax
from whet.rewrite.constants import reshape_weight
from whet.rewrite.graph import Graph
from whet.rewrite.matching import interior_escapes, maker_of_op
from whet.rewrite.rules import Phase, Skip, rule


@rule("Reshape", phase=Phase.CLEAN, after=["fold_shapes"], level=2)
def window_mask_to_add(g: Graph, layer: Layer) -> Tensor | Skip | None:
    add = maker_of_op(g, layer.inputs[0], "Add")
    if add is None or add.output.type.rank != 5 or not only_feeds_softmax(g, layer.output):
        return None
    for value, mask in (add.inputs, add.inputs[::-1]):
        split = g.maker(value)
        scores = split.inputs[0] if split is not None and split.op in ("Reshape", "Unsqueeze") else None
        if split is None or scores is None or mask is None or value is None or scores.type != layer.output.type or not are_scores(g, scores):
            continue
        batch, windows, *rest = value.shape
        dims = (1,) * (5 - mask.type.rank) + tuple(mask.shape)
        if value.type != add.output.type or tuple(rest) != scores.shape[1:] or dims[0] != 1 or dims[1] != windows:
            return Skip(f"%{mask.name}: {mask.type} is not a mask per window of %{value.name}: {value.type}")
        if reason := interior_escapes(g, layer, [split, add]):
            return Skip(reason)
        if mask.weight is not None:
            flat = g.constant(reshape_weight(mask.weight, tuple(int(d) for d in dims[1:])), mask.name)
        else:
            flat = g.add("Reshape", mask, shape=dims[1:])
        return g.add("Add", scores, flat if batch == 1 else g.add("Tile", flat, repeats=(batch, 1, 1, 1)))
    return None
