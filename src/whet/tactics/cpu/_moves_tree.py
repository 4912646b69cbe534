"""Layers that move numbers and compute with them, as a tree for each element of the result: loads, constants, arithmetic, and where parts join.

A place is a whole number that depends on the row and the column of the element, so that code can ask once a row what depends on the row alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import numpy as np

from whet.network import Layer, Tensor, static_shape, stored_shape

ROW, COLUMN = ("row",), ("column",)
Atom = tuple
"""ROW, COLUMN, or ("div" | "mod", place, number, how many values it has)."""
Node = tuple
"""("number", value), ("source", which, place), ("blocked", which, place, channel, length of a block), ("constant", first, place),
("step", op, nodes) or ("choice", place, limits, nodes)."""
BLOCK = 16  # channels that lie together in nChw16c


class Refused(Exception):
    """The layer has something in it that has no code."""


@dataclass(frozen=True)
class Place:
    """`offset` and multiples of atoms, added up."""

    offset: int = 0
    terms: tuple[tuple[Atom, int], ...] = ()

    def plus(self, other: Place | int) -> Place:
        if isinstance(other, int):
            return Place(self.offset + other, self.terms)
        found = dict(self.terms)
        for atom, n in other.terms:
            found[atom] = found.get(atom, 0) + n
        return Place(self.offset + other.offset, tuple((a, n) for a, n in found.items() if n))

    def times(self, by: int) -> Place:
        return Place(self.offset * by, tuple((a, n * by) for a, n in self.terms))

    def cut(self, how: str, by: int, count: int) -> Place:
        """Its quotient ("div") or rest ("mod") by a number, of which there are `count`."""
        if not self.terms:
            return Place(self.offset // by if how == "div" else self.offset % by)
        if self.offset % by == 0 and all(n % by == 0 for _, n in self.terms):
            return Place(self.offset // by, tuple((a, n // by) for a, n in self.terms)) if how == "div" else Place()
        return Place(0, (((how, self, by, count), 1),))

    @property
    def by_column(self) -> bool:
        """Whether it depends on the column."""
        return any(a == COLUMN or (a != ROW and a[1].by_column) for a, _ in self.terms)

    @property
    def step(self) -> int:
        """How far the next column's is. Raises Refused where that differs from column to column."""
        if any(a not in (ROW, COLUMN) and a[1].by_column for a, _ in self.terms):
            raise Refused("what lies together in a row of the result is cut apart within")
        return dict(self.terms).get(COLUMN, 0)

    def fixed(self, atom: Atom, value: int) -> Place:
        """The place where an atom is known to be `value`."""
        found = Place(self.offset)
        for a, n in self.terms:
            if a == atom:
                found = found.plus(value * n)
            elif a in (ROW, COLUMN):
                found = found.plus(Place(0, ((a, n),)))
            else:
                found = found.plus(a[1].fixed(atom, value).cut(a[0], a[2], a[3]).times(n))
        return found

    @property
    def row(self) -> Place:
        """What it is in column 0, without the offset."""
        return Place(0, tuple((a, n) for a, n in self.terms if a != COLUMN))


class Moves:
    """The tree of a fused layer (`root`), the length of a row, its constants, and the sources by their places among the inputs. Raises Refused.

    `formats` gives the format of each run-time input by its place: row-major, channels last ("nhwc") or in whole blocks ("nChw16c"); `out` that of
    the result: row-major, or channels last.
    """

    def __init__(self, layer: Layer, formats: dict[int, str], out: str) -> None:
        self.layer, self.body, self.formats = layer, layer.regions["body"], formats
        self.sources = sorted(formats)
        self.outer = {t: i for i, t in enumerate(self.body.inputs)}
        self._held: list[tuple[np.ndarray, int]] = []
        self._nodes: dict[tuple[Tensor, tuple[Place, ...]], Node] = {}
        shape = static_shape(layer.outputs[0].shape)
        sizes = static_shape(stored_shape(out, shape))
        self.rows, self.columns = prod(sizes[:-1]), sizes[-1]
        places = [*_axes(Place(0, ((ROW, 1),)), sizes[:-1]), Place(0, ((COLUMN, 1),))]
        found = dict(zip(_order(len(shape), out), places, strict=True))
        self.root = self._node(self.body.outputs[0], tuple(found[i] for i in range(len(shape))))

    @property
    def numbers(self) -> np.ndarray:
        """All constants behind each other, at least one."""
        return np.concatenate([*(a for a, _ in self._held), np.zeros(1, np.float32)])

    def _node(self, t: Tensor, at: tuple[Place, ...]) -> Node:
        key = (t, at)
        if key not in self._nodes:
            self._nodes[key] = self._made(t, at)
        return self._nodes[key]

    def _made(self, t: Tensor, at: tuple[Place, ...]) -> Node:
        if t in self.outer:
            return self._leaf(self.layer.needs(self.outer[t]), self.outer[t], at)
        if t.weight is not None:
            return self._leaf(t, -1, at)
        layer = t.maker
        if layer is None:
            raise Refused(f"%{t.name} comes from nowhere")
        shape = static_shape(t.shape)
        if layer.op == "Reshape":
            return self._node(layer.needs(0), _regrouped(at, shape, static_shape(layer.needs(0).shape)))
        if layer.op == "Transpose":
            perm = layer.attrs["perm"]
            return self._node(layer.needs(0), tuple(at[perm.index(i)] for i in range(len(perm))))
        if layer.op == "Split":
            axis = int(layer.attrs["axis"]) % len(shape)
            before = sum(static_shape(o.shape)[axis] for o in layer.outputs[: [o is t for o in layer.outputs].index(True)])
            return self._node(layer.needs(0), _shifted(at, axis, before))
        if layer.op == "Slice":
            starts, _, axes = (self._constant(layer.needs(i)) for i in (1, 2, 3))
            if layer.input(4) is not None or starts.min() < 0:
                raise Refused("a Slice with steps, or from the end")
            for axis, start in zip(axes.tolist(), starts.tolist(), strict=True):
                at = _shifted(at, axis % len(shape), start)
            return self._node(layer.needs(0), at)
        if layer.op == "Concat":
            axis, start = int(layer.attrs["axis"]) % len(shape), 0
            limits, parts = [], []
            for i in range(len(layer.inputs)):
                parts.append(self._node(layer.needs(i), _shifted(at, axis, -start)))
                start += static_shape(layer.needs(i).shape)[axis]
                limits.append(start)
            return ("choice", at[axis], tuple(limits), tuple(parts))
        operands = [layer.needs(i) for i in range(len(layer.inputs))]
        return ("step", layer.op, tuple(self._node(x, _spread(at, static_shape(x.shape))) for x in operands))

    def _constant(self, t: Tensor) -> np.ndarray:
        value = self.layer.inputs[self.outer[t]] if t in self.outer else t
        if value is None or not value.is_constant:
            raise Refused(f"%{t.name} is computed at run time")
        return value.array().reshape(-1)

    def _leaf(self, t: Tensor, where: int, at: tuple[Place, ...]) -> Node:
        shape = static_shape(t.shape)
        if not t.is_constant and self.formats[where] == "nChw16c":
            pixels = prod(shape[2:])
            image = at[0].times(shape[1] * pixels) if shape[0] != 1 else Place()
            place = image.plus(_flat(at[2:], shape[2:], "linear").times(BLOCK))
            return ("blocked", self.sources.index(where), place, at[1], pixels * BLOCK)
        if not t.is_constant:
            return ("source", self.sources.index(where), _flat(at, shape, self.formats[where]))
        values = np.asarray(t.array(), np.float32).reshape(-1)
        if values.size == 1:
            return ("number", float(values[0]))
        first = next((begin for known, begin in self._held if np.array_equal(known, values)), None)
        if first is None:
            first = sum(a.size for a, _ in self._held)
            self._held.append((values, first))
        return ("constant", first, _flat(at, shape, "linear"))


def choices(node: Node) -> list[Node]:
    """All choices in a tree, outermost first."""
    if node[0] == "choice":
        return [node, *(c for part in node[3] for c in choices(part))]
    return [c for part in node[2] for c in choices(part)] if node[0] == "step" else []


def replaced(node: Node, old: Node, new: Node) -> Node:
    """The tree with `new` wherever `old` stands."""
    if node == old:
        return new
    if node[0] == "step":
        return (*node[:2], tuple(replaced(p, old, new) for p in node[2]))
    return (*node[:3], tuple(replaced(p, old, new) for p in node[3])) if node[0] == "choice" else node


def fixed(node: Node, atom: Atom, value: int) -> Node:
    """The tree where an atom is known to be `value`."""
    return tuple(
        part.fixed(atom, value) if isinstance(part, Place) else _all_fixed(part, atom, value) if isinstance(part, tuple) else part for part in node
    )


def _all_fixed(parts: tuple, atom: Atom, value: int) -> tuple:
    return tuple(fixed(p, atom, value) if isinstance(p, tuple) else p for p in parts)


def blocked(node: Node) -> list[Node]:
    """All loads from blocks of channels in a tree."""
    if node[0] == "blocked":
        return [node]
    parts = node[2] if node[0] == "step" else node[3] if node[0] == "choice" else ()
    return [b for part in parts for b in blocked(part)]


def always(node: Node) -> set[Node]:
    """A node and all below it that is needed whatever its choices are."""
    if node[0] == "choice":
        return {node} | set.intersection(*(always(p) for p in node[3]))
    return {node}.union(*(always(p) for p in node[2])) if node[0] == "step" else {node}


def height(node: Node) -> int:
    """Steps below a node."""
    return 1 + max((height(p) for p in node[2]), default=0) if node[0] == "step" else 0


def _order(rank: int, fmt: str) -> list[int]:
    return [0, *range(2, rank), 1] if fmt == "nhwc" else list(range(rank))


def _shifted(at: tuple[Place, ...], axis: int, by: int) -> tuple[Place, ...]:
    return (*at[:axis], at[axis].plus(by), *at[axis + 1 :])


def _spread(at: tuple[Place, ...], shape: Sequence[int]) -> tuple[Place, ...]:
    """The place in an operand that broadcasts."""
    return tuple(Place() if d == 1 else i for d, i in zip(shape, at[len(at) - len(shape) :], strict=True))


def _flat(at: Sequence[Place], shape: Sequence[int], fmt: str) -> Place:
    """Where an element lies in memory, in elements."""
    found = Place()
    for axis in _order(len(shape), fmt):
        found = found.times(shape[axis]).plus(at[axis] if shape[axis] != 1 else Place())
    return found


def _axes(flat: Place, shape: Sequence[int]) -> list[Place]:
    """Places along the axes of a block of this shape, from the place in it."""
    found = []
    for k, d in enumerate(shape):
        place = flat.cut("div", prod(shape[k + 1 :]), prod(shape[: k + 1]))
        found.append(Place() if d == 1 else place if prod(shape[:k]) == 1 else place.cut("mod", d, d))
    return found


def _regrouped(at: tuple[Place, ...], after: Sequence[int], before: Sequence[int]) -> tuple[Place, ...]:
    """Places in the shape before a Reshape: axes go by the smallest groups of equal size, those that stay as they are keep their places."""
    found: list[Place] = []
    i = j = 0
    while i < len(after) or j < len(before):
        a, b, left, right = i, j, 1, 1
        while left != right or (i == a and j == b):
            if j == len(before) or (left <= right and i < len(after)):
                left, i = left * after[i], i + 1
            else:
                right, j = right * before[j], j + 1
        while i < len(after) and after[i] == 1:
            i += 1
        while j < len(before) and before[j] == 1:
            j += 1
        wide, narrow = [k for k in range(a, i) if after[k] != 1], [k for k in range(b, j) if before[k] != 1]
        if [after[k] for k in wide] == [before[k] for k in narrow]:
            same = dict(zip(narrow, (at[k] for k in wide), strict=True))
            found += [same.get(k, Place()) for k in range(b, j)]
        else:
            found += _axes(_flat(at[a:i], after[a:i], "linear"), before[b:j])
    return tuple(found)
