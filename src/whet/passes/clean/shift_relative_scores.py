"""Scores of relative positions: a gather by the distance of key and query becomes a product with columns in the order of the distances, and views.

DeBERTa multiplies queries (and keys) by the embeddings of all relative positions and gathers, for each pair, the score of its distance:
y[i, j] = (x @ w)[i, f(j - i)]. With the columns w'[d] = w[f(d)] this is (x @ w')[i, j - i + rows - 1]: in a flat view of the product the rows of y
begin one element earlier than the rows of the product, so that Reshapes and Slices select them. Distances that do not occur are not multiplied.
"""

from __future__ import annotations

import numpy as np

from whet.network import Layer, Tensor
from whet.ops._origin import express, make_literal
from whet.rewrite.graph import Graph
from whet.rewrite.matching import find_maker_of_op
from whet.rewrite.rules import Phase, Skip, rule

_ALIGNED = 8  # columns: kernels read rows of a multiple of them


@rule("GatherElements", phase=Phase.CLEAN, after=["fold_constants", "fold_shapes"], level=2)
def shift_relative_scores(g: Graph, layer: Layer) -> Tensor | Skip | None:
    product = find_maker_of_op(g, layer.inputs[0], "MatMul")
    if product is None or not layer.output.type.static or layer.attrs["axis"] % layer.output.type.rank != layer.output.type.rank - 1:
        return None
    x, weights = product.inputs
    lead, rows, keys = tuple(layer.output.shape[:-2]), int(layer.output.shape[-2]), int(layer.output.shape[-1])
    if weights is None or weights.weight is None or x is None or x.is_constant or weights.type.rank < 2 or min(rows, keys) < 2:
        return None
    if tuple(product.output.shape[:-1]) != (*lead, rows):
        return Skip("it takes a part of the rows")
    columns = _find_columns(g, layer.inputs[1], rows, keys, int(weights.shape[-1]))
    if isinstance(columns, Skip) or columns is None:
        return columns
    if reason := g.escapes(product.output, layer):
        return Skip(reason)
    length = -(-columns.size // _ALIGNED) * _ALIGNED
    columns = np.pad(columns, (0, length - columns.size), mode="edge")
    ordered = g.constant(express("Gather", weights.weight, make_literal(columns), axis=weights.type.rank - 1), f"{weights.name}.by_distance")
    y = g.add("MatMul", x, ordered, name=f"{product.name}/distances", sources=product.sources)
    axis, first = len(lead), rows - 1
    y = g.add("Reshape", y, shape=(*lead, rows * length), sources=())
    y = g.add("Slice", y, starts=(first,), ends=(first + rows * (length - 1),), axes=(axis,), steps=(1,), name=layer.name, sources=layer.sources)
    y = g.add("Reshape", y, shape=(*lead, rows, length - 1), sources=())
    return g.add("Slice", y, starts=(0,), ends=(keys,), axes=(axis + 1,), steps=(1,), sources=()) if keys < length - 1 else y


def _find_columns(g: Graph, index: Tensor | None, rows: int, keys: int, count: int) -> np.ndarray | Skip | None:
    """The column of each distance key - query, from 1 - rows to keys - 1; a Skip where an index depends on more; None if it is not constant."""
    expand = find_maker_of_op(g, index, "Expand")
    source = expand.inputs[0] if expand is not None else index
    if source is None or source.weight is None:
        return None
    places = np.asarray(source.array())
    if places.ndim < 2 or places.shape[-2:] != (rows, keys):
        return Skip("its indices are not those of pairs of a query and a key")
    places = places.reshape(-1, rows, keys) % count
    if (places != places[0]).any() or (places[0, 1:, 1:] != places[0, :-1, :-1]).any():
        return Skip("its indices depend on more than the distance of key and query")
    return np.concatenate([places[0, ::-1, 0], places[0, 0, 1:]])
