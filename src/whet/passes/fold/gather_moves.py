"""Several layers that only move whole rows of one tensor become one Gather of rows at constant indices.

Shifted windows are rolled (Slices and a Concat along each axis) and partitioned (Reshape, Transpose, Reshape): seven copies become one. Patch merging
(strided Slices and a Concat) likewise, and two such Gathers in a row. Chains with a single copy stay as they are.
"""

from __future__ import annotations

from math import prod

import numpy as np

from whet.network import Layer, Tensor
from whet.ops import run_layer
from whet.ops._origin import make_literal
from whet.rewrite.graph import Graph
from whet.rewrite.rules import Phase, Skip, rule

_VIEWS = frozenset({"Flatten", "Reshape", "Squeeze", "Unsqueeze"})
_COPIES = frozenset({"Concat", "Gather", "Slice", "Transpose"})
_MOST_LAYERS = 64
_MOST_ELEMENTS = 1 << 25  # of a tensor whose places are followed
_MOST_ROWS = 1 << 18
_ROW = 8  # elements: kernels copy shorter rows slowly


@rule(*_COPIES, *_VIEWS, phase=Phase.FOLD, after=["fold_pads"], level=2)
def gather_moves(g: Graph, layer: Layer) -> Tensor | Skip | None:
    if not _is_move(layer) or _is_read_by_moves(g, layer.output):
        return None
    subgraph = _find_subgraph(g, layer)
    if subgraph is None:
        return None
    source, members = subgraph
    copies = [m for m in members if m.op in _COPIES]
    gathers = sum(m.op == "Gather" for m in copies)
    if (len(copies) < 3 and gathers < 2) or max(prod(t.shape) for t in (source, layer.output)) > _MOST_ELEMENTS:
        return None
    if not any(m.op == "Concat" for m in copies) and gathers < 2:
        return None  # Slices and Transposes alone are views for many kernels
    places = _compute_source_indices(source, members, layer.output)
    row = _compute_row_length(places, int(source.shape[-1]), int(layer.output.shape[-1]))
    if row < _ROW or places.size // row > _MOST_ROWS:
        return Skip(f"the moved rows have {row} elements")
    at = places.reshape(-1, row)[:, 0] // row
    rows = g.add("Reshape", source, shape=(prod(source.shape) // row, row), sources=())
    index = g.constant(make_literal(at) if at.size <= 1024 else at.astype(np.int64), f"{layer.name}.rows")
    gathered = g.add("Gather", rows, index, axis=0, name=layer.name, sources=tuple(dict.fromkeys(s for m in members for s in m.sources)))
    return g.add("Reshape", gathered, shape=layer.output.shape, sources=())


def _is_read_by_moves(g: Graph, t: Tensor) -> bool:
    """True if only moves read `t`: the chain is then matched from its end."""
    readers = g.readers(t)
    return bool(readers) and not g.is_output(t) and all(r.op in _COPIES or r.op in _VIEWS for r in readers)


def _find_subgraph(g: Graph, last: Layer) -> tuple[Tensor, list[Layer]] | None:
    """The one tensor from which `last` takes its values, and the moves between, in order; values inside have no readers outside."""
    members: dict[Layer, None] = {last: None}
    waiting = [last]
    sources: dict[Tensor, None] = {}
    while waiting:
        current = waiting.pop()
        for t in current.inputs[:1] if current.op != "Concat" else current.inputs:
            maker = g.maker(t)
            if t is None or (maker is not None and maker in members):
                continue
            if maker is None or g.is_output(t) or not _is_move(maker):
                sources[t] = None
                continue
            members[maker] = None
            waiting.append(maker)
            if len(members) > _MOST_LAYERS:
                return None
    if len(sources) != 1 or next(iter(sources)).is_constant:
        return None
    if any(r not in members for m in members if m is not last for r in g.readers(m.output)):
        return None
    return next(iter(sources)), sorted(members, key=g.position)


def _is_move(layer: Layer) -> bool:
    """True for a move between tensors of static shapes with constant parameters."""
    if layer.op not in (_VIEWS | _COPIES) or not all(t is None or t.type.static for t in (*layer.inputs, layer.output)):
        return False
    return layer.op == "Concat" or all(t is None or t.is_constant for t in layer.inputs[1:])


def _compute_source_indices(source: Tensor, members: list[Layer], result: Tensor) -> np.ndarray:
    """The place in `source` of every element of the result."""
    values: dict[Tensor, np.ndarray] = {source: np.arange(prod(source.shape), dtype=np.int32).reshape(source.shape)}
    for m in members:
        inputs = [None if t is None else values[t] if t in values else t.array() for t in m.inputs]
        values[m.output] = np.asarray(run_layer(m, inputs)[0])
    return values[result]


def _compute_row_length(places: np.ndarray, source_row: int, result_row: int) -> int:
    """The length of the longest runs of adjacent elements that begin at multiples of their length."""
    length = int(np.gcd(source_row, result_row))
    runs = places.reshape(-1, length)
    aligned = bool((runs[:, 0] % length == 0).all()) and bool((np.diff(runs, axis=1) == 1).all())
    return length if aligned else 0
