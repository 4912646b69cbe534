"""Chains of layers that move whole rows (of the last axis) of one tensor: the place of each row, and chains made from places."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import numpy as np

from whet.network import Layer, Tensor, static_shape
from whet.ops._origin import make_literal
from whet.rewrite.graph import Graph

VIEWS = frozenset({"Flatten", "Reshape", "Squeeze", "Unsqueeze"})
MOST_ROWS = 1 << 18


@dataclass(frozen=True)
class RowMove:
    """A tensor of moved rows: `rows[i]` is the row of `source` that is its row i, each exactly once; `layers`: the chain, the last one first."""

    source: Tensor
    rows: np.ndarray
    layers: tuple[Layer, ...]

    @property
    def inverse(self) -> np.ndarray:
        """The row of the result that each row of the source is."""
        back = np.empty_like(self.rows)
        back[self.rows] = np.arange(self.rows.size)
        return back

    @property
    def keeps_order(self) -> bool:
        """True if the rows stay where they are."""
        return bool((self.rows == np.arange(self.rows.size)).all())


def match_row_move(g: Graph, t: Tensor | None, *readers: Layer) -> RowMove | None:
    """The chain that makes `t`, as long as possible: views that keep the last axis, Transposes and Gathers of whole rows, each inner value read by
    the next layer only, `t` by `readers` only. None without a chain, and if a row is missing or repeated."""
    if t is None or not t.type.static or t.type.rank < 2 or prod(static_shape(t.shape)[:-1]) > MOST_ROWS or g.escapes(t, *readers):
        return None
    chain: list[Layer] = []
    while (maker := g.maker(t)) is not None and t is not None and _moves_rows(maker) and (not chain or not g.escapes(t, chain[-1])):
        chain.append(maker)
        t = maker.inputs[0]
    if not chain or t is None or t.is_constant:
        return None
    rows = np.arange(prod(static_shape(t.shape)[:-1])).reshape(static_shape(t.shape)[:-1])
    for layer in reversed(chain):
        if layer.op == "Transpose":
            rows = rows.transpose(tuple(layer.attrs["perm"])[:-1])
        elif layer.op == "Gather":
            rows = np.take(rows, layer.needs(1).array(), axis=int(layer.attrs["axis"]) % layer.needs(0).type.rank)
        else:
            rows = rows.reshape(static_shape(layer.output.shape)[:-1])
    rows = rows.reshape(-1)
    if rows.size != prod(static_shape(t.shape)[:-1]) or (np.bincount(rows, minlength=rows.size) != 1).any():
        return None
    return RowMove(t, rows, tuple(chain))


def add_row_move(g: Graph, x: Tensor, rows: np.ndarray, shape: tuple[int, ...], name: str, sources: tuple[str, ...] = ()) -> Tensor:
    """Rows of `x` in a new order, as a tensor of `shape` with the last axis of `x`."""
    if (rows == np.arange(rows.size)).all():
        return g.add("Reshape", x, shape=shape, sources=())
    flat = g.add("Reshape", x, shape=(rows.size, int(x.shape[-1])), sources=())
    index = g.constant(make_literal(rows) if rows.size <= 1024 else rows.astype(np.int64), f"{name}.rows")
    return g.add("Reshape", g.add("Gather", flat, index, axis=0, name=name, sources=sources), shape=shape, sources=())


def _moves_rows(layer: Layer) -> bool:
    """True for a layer with static shapes that only moves rows and keeps their length."""
    x = layer.input(0)
    if x is None or layer.op not in (*VIEWS, "Transpose", "Gather") or len(layer.outputs) != 1 or not x.type.static or not layer.output.type.static:
        return False
    if x.type.rank < 2 or layer.output.type.rank < 2 or x.shape[-1] != layer.output.shape[-1]:
        return False
    last = x.type.rank - 1
    if layer.op == "Transpose":
        return int(layer.attrs["perm"][last]) == last
    if layer.op == "Gather":
        return layer.needs(1).is_constant and int(layer.attrs["axis"]) % x.type.rank != last
    return all(t is None or t.is_constant for t in layer.inputs[1:])
