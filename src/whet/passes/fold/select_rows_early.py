"""A Gather or Slice of few rows moves before the products and norms that compute each row by itself: other rows are never computed.

A Vision Transformer's classifier and BERT's pooler read one token. In the last block, the projection after attention, both products of the MLP and
all norms then have one row instead of 197 or 128.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import prod
from typing import Any

import numpy as np

from whet.network import Layer, Tensor, static_shape
from whet.ops import get_op
from whet.ops._origin import express, make_literal
from whet.ops.slice import slice_ranges
from whet.rewrite.graph import Graph
from whet.rewrite.rules import Fired, Phase, Skip, network_pass

_PRODUCTS = frozenset({"Gemm", "MatMul"})
_NORMS = frozenset({"LayerNormalization", "RMSNormalization"})
_LEAST = 2  # times as many rows as are selected
_MOST_ROWS = 1024


@dataclass
class _Region:
    """The layers before a selection that compute its rows one by one, and the axis of rows of each tensor that they read or produce."""

    layers: list[Layer] = field(default_factory=list)
    axes: dict[Tensor, int] = field(default_factory=dict)


@network_pass(phase=Phase.FOLD, after=["cancel_folded_reshapes", "fold_scale_shift", "gather_moves"])
def select_rows_early(g: Graph) -> list[Fired | Skip]:
    log: list[Fired | Skip] = []
    for layer in list(g.layers):
        if layer.op not in ("Gather", "Slice") or not g.alive(layer):
            continue
        selection = _match_selection(layer)
        if selection is None:
            continue
        axis, rows = selection
        region = _find_region(g, layer, axis)
        products = [x.name for x in region.layers if x.op in _PRODUCTS]
        if not products:
            continue
        _move(g, layer, rows, region)
        log.append(Fired(f"{rows.size} of {layer.needs(0).shape[axis]} rows are selected before {', '.join(products)}", layer.name))
    return log


def _match_selection(layer: Layer) -> tuple[int, np.ndarray] | None:
    """The axis and the rows of a selection of few rows by constant indices; not of the last axis."""
    x = layer.needs(0)
    if x.is_constant:
        return None
    if layer.op == "Gather":
        index = layer.needs(1)
        axis = int(layer.attrs["axis"]) % x.type.rank
        if not index.is_constant or index.type.rank > 1:
            return None
        rows = np.asarray(index.array(), np.int64).reshape(-1)
    else:
        ranges = {a: r for a, r in slice_ranges(layer).items() if r != (0, x.shape[a], 1)}
        if len(ranges) != 1:
            return None
        ((axis, (start, length, step)),) = ranges.items()
        if not (isinstance(start, int) and isinstance(length, int) and isinstance(step, int)):
            return None
        rows = start + step * np.arange(length)
    count = x.shape[axis]
    if axis == x.type.rank - 1 or not isinstance(count, int) or not 0 < rows.size * _LEAST <= count or rows.size > _MOST_ROWS:
        return None
    return axis, rows % count


def _find_region(g: Graph, selection: Layer, axis: int) -> _Region:
    """The region before a selection along `axis`: only layers whose results nothing else reads."""
    region = _Region(axes={selection.needs(0): axis})
    waiting = {maker} if (maker := g.maker(selection.needs(0))) is not None else set()
    members = {selection}
    while waiting:
        layer = max(waiting, key=g.position)  # after all of its readers
        waiting.remove(layer)
        if len(layer.outputs) != 1 or layer.regions or g.is_output(layer.output) or not all(r in members for r in g.readers(layer.output)):
            continue
        operands = _map_operands(layer, region.axes[layer.output])
        if operands is None or any(region.axes.get(t, a) != a for t, a in operands.items()):
            continue
        region.axes |= operands
        region.layers.append(layer)
        members.add(layer)
        waiting |= {maker for t in operands if (maker := g.maker(t)) is not None}
    _leave_views(region)
    return region


def _leave_views(region: _Region) -> None:
    """Leaves out what is before the first products and norms: views and elementwise layers, which other passes match (those of attention)."""
    made = set[Tensor]()
    kept: list[Layer] = []
    for layer in reversed(region.layers):
        if layer.op in _PRODUCTS | _NORMS or any(t in made for t in _map_operands(layer, region.axes[layer.output]) or ()):
            made.add(layer.output)
            kept.append(layer)
    region.layers = kept[::-1]


def _map_operands(layer: Layer, axis: int) -> dict[Tensor, int] | None:
    """The operands that have the rows of the result's `axis`, and along which axis; None if a row of the result depends on other rows."""
    x, y = layer.input(0), layer.output
    if x is None:
        return None
    if layer.op == "MatMul":
        w = layer.needs(1)
        return {x: axis} if w.is_constant and w.type.rank == 2 and x.type.rank == y.type.rank and axis < y.type.rank - 1 else None
    if layer.op == "Gemm":
        added = layer.input(2)
        plain = layer.needs(1).is_constant and not layer.attrs["transA"] and (added is None or added.type.rank < 2 or added.shape[0] == 1)
        return {x: 0} if plain and axis == 0 else None
    if layer.op in _NORMS:
        constant = all(t is None or t.is_constant for t in layer.inputs[1:])
        return {x: axis} if constant and axis < int(layer.attrs["axis"]) % x.type.rank else None
    if layer.op == "Transpose":
        return {x: int(layer.attrs["perm"][axis])}
    if layer.op == "Reshape":
        return _map_reshape(layer, x, axis)
    if not get_op(layer.op).pointwise or not get_op(layer.op).pure:
        return None
    operands: dict[Tensor, int] = {}
    for t in layer.inputs:
        if t is None or (at := axis - (y.type.rank - t.type.rank)) < 0 or t.shape[at] == 1:
            continue
        if operands.setdefault(t, at) != at:
            return None
    return operands


def _map_reshape(layer: Layer, x: Tensor, axis: int) -> dict[Tensor, int] | None:
    """The same for a Reshape: an axis of the same size with as many elements before it."""
    if not x.type.static or not layer.output.type.static:
        return None
    given, shape = static_shape(x.shape), static_shape(layer.output.shape)
    return next(({x: b} for b, n in enumerate(given) if n == shape[axis] and prod(given[:b]) == prod(shape[:axis])), None)


def _move(g: Graph, selection: Layer, rows: np.ndarray, region: _Region) -> None:
    """Computes the region for the selected rows alone, in place of the selection."""
    index = g.constant(make_literal(rows), f"{selection.name}.rows")
    selected: dict[Tensor, Tensor] = {}
    names: list[tuple[Layer, str]] = []
    drops = selection.output.type.rank < selection.needs(0).type.rank

    def select(t: Tensor, at: float) -> Tensor:
        if t not in selected:
            axis = region.axes[t]
            if t.weight is not None:
                selected[t] = g.constant(express("Gather", t.weight, make_literal(rows), axis=axis), f"{t.name}.rows")
            else:
                selected[t] = _add_at(g, at, "Gather", t, index, axis=axis, sources=selection.sources).output
        return selected[t]

    for layer in reversed(region.layers):
        operands, at = _map_operands(layer, region.axes[layer.output]) or {}, g.position(layer)
        inputs = [select(t, at - 0.5) if t is not None and t in operands else t for t in layer.inputs]
        attrs = dict(layer.attrs)
        if layer.op == "Reshape":
            shape, axis = static_shape(layer.output.shape), region.axes[layer.output]
            inputs, attrs = inputs[:1], {"shape": (*shape[:axis], rows.size, *shape[axis + 1 :])}
        if layer is region.layers[0] and layer.op in _NORMS and drops:  # the classifier's product then follows the norm
            axis, x = region.axes[layer.output], layer.needs(0)
            inputs[0] = _add_at(g, at - 0.25, "Squeeze", inputs[0], axes=(axis,), sources=selection.sources).output
            attrs["axis"] = int(attrs["axis"]) % x.type.rank - x.type.rank
        smaller = _add_at(g, at, layer.op, *inputs, sources=layer.sources, **attrs)
        selected[layer.output] = smaller.output
        names.append((smaller, layer.name))
    result, old, at = selected[selection.needs(0)], selection.output, g.position(selection)
    if result.type.rank != old.type.rank:
        result = _add_at(g, at, "Squeeze", result, axes=(region.axes[selection.needs(0)],), sources=selection.sources).output
    g.replace(old, result, at, rename=True)
    g.remove([selection, *region.layers])
    for layer, name in names:
        layer.name = name


def _add_at(g: Graph, at: float, op: str, *inputs: Tensor | None, **more: Any) -> Layer:
    """A new layer of one output at a position in execution order."""
    layer = g.add(op, *inputs, **more).maker
    assert isinstance(layer, Layer)
    g.set_position(layer, at)
    return layer
