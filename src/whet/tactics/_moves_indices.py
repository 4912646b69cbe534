"""Symbolic indices of result and source elements as sums of terms, so that terms that depend only on the row are computed once per row.

An index is an integer expression, independent of the target: the CPU kernel translates it to LLVM IR, the GPU kernel to C.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

Atom = tuple
"""ROW, COLUMN, FLAT, or ("div" | "mod", place, number, how many values it has)."""
ROW, COLUMN, FLAT = ("row",), ("column",), ("at",)
_GIVEN = (ROW, COLUMN, FLAT)


class Refused(Exception):
    """The kernel cannot generate code for the layer."""


@dataclass(frozen=True)
class Place:
    """A linear index: `offset` plus multiples of atoms."""

    offset: int = 0
    terms: tuple[tuple[Atom, int], ...] = ()

    @staticmethod
    def of(atom: Atom) -> Place:
        """The index that consists of one atom."""
        return Place(0, ((atom, 1),))

    def plus(self, other: Place | int) -> Place:
        """The sum. A quotient and remainder of the same index are rejoined: x / d * d + x % d is x."""
        if isinstance(other, int):
            return Place(self.offset + other, self.terms)
        terms = dict(self.terms)
        for atom, n in other.terms:
            terms[atom] = terms.get(atom, 0) + n
        return _simplify(Place(self.offset + other.offset, tuple((a, n) for a, n in terms.items() if n)))

    def times(self, by: int) -> Place:
        return Place(self.offset * by, tuple((a, n * by) for a, n in self.terms))

    def cut(self, how: str, by: int, count: int) -> Place:
        """Its quotient ("div") or remainder ("mod") by `by`, with `count` possible values."""
        if not self.terms:
            return Place(self.offset // by if how == "div" else self.offset % by)
        if self.offset % by == 0 and all(n % by == 0 for _, n in self.terms):
            return Place(self.offset // by, tuple((a, n // by) for a, n in self.terms)) if how == "div" else Place()
        return Place.of((how, self, by, count))

    @property
    def by_column(self) -> bool:
        """True if it depends on the column."""
        return any(a == COLUMN or (a not in _GIVEN and a[1].by_column) for a, _ in self.terms)

    @property
    def step(self) -> int:
        """The stride between consecutive columns. Raises Refused if it is not constant."""
        if any(a not in _GIVEN and a[1].by_column for a, _ in self.terms):
            raise Refused("what lies together in a row of the result is cut apart within")
        return dict(self.terms).get(COLUMN, 0)

    def fix(self, atom: Atom, value: int) -> Place:
        """The index with an atom fixed to `value`."""
        total = Place(self.offset)
        for a, n in self.terms:
            if a == atom:
                total = total.plus(value * n)
            elif a in _GIVEN:
                total = total.plus(Place(0, ((a, n),)))
            else:
                total = total.plus(a[1].fix(atom, value).cut(a[0], a[2], a[3]).times(n))
        return total

    @property
    def row(self) -> Place:
        """Its value in column 0, without the offset."""
        return Place(0, tuple((a, n) for a, n in self.terms if a != COLUMN))


def _simplify(place: Place) -> Place:
    """The same value with the fewest divisions: a quotient and its remainder, or two remainders of one index, are merged."""
    for low, n in place.terms:
        if low[0] != "mod":
            continue
        _, inner, size, _ = low
        for high, m in place.terms:
            if m != n * size or high in _GIVEN:
                continue
            how, cut, by, count = high
            if how == "div" and (cut, by) == (inner, size):
                whole = inner
            elif how == "mod" and len(cut.terms) == 1 and cut == Place.of(cut.terms[0][0]) and cut.terms[0][0][:3] == ("div", inner, size):
                whole = inner.cut("mod", size * by, size * count)
            else:
                continue
            return Place(place.offset, tuple((a, k) for a, k in place.terms if a not in (low, high))).plus(whole.times(n))
    return place


def order(rank: int, fmt: str) -> list[int]:
    """Axes in memory order, outermost first."""
    return [0, *range(2, rank), 1] if fmt == "nhwc" else list(range(rank))


def shift_index(at: tuple[Place, ...], axis: int, by: int) -> tuple[Place, ...]:
    """Indices along all axes, with one axis shifted."""
    return (*at[:axis], at[axis].plus(by), *at[axis + 1 :])


def broadcast_index(at: tuple[Place, ...], shape: Sequence[int]) -> tuple[Place, ...]:
    """The indices into a broadcast operand."""
    return tuple(Place() if d == 1 else i for d, i in zip(shape, at[len(at) - len(shape) :], strict=True))


def compute_flat_offset(at: Sequence[Place], shape: Sequence[int], fmt: str) -> Place:
    """Memory offset of an element, in elements."""
    offset = Place()
    for axis in order(len(shape), fmt):
        offset = offset.times(shape[axis]).plus(at[axis] if shape[axis] != 1 else Place())
    return offset


def unflatten(index: Place, shape: Sequence[int]) -> list[Place]:
    """Indices along the axes of a block of this shape, from the flat index in it."""
    indices = []
    for k, d in enumerate(shape):
        place = index.cut("div", prod(shape[k + 1 :]), prod(shape[: k + 1]))
        indices.append(Place() if d == 1 else place if prod(shape[:k]) == 1 else place.cut("mod", d, d))
    return indices


def regroup_indices(at: tuple[Place, ...], after: Sequence[int], before: Sequence[int]) -> tuple[Place, ...]:
    """Indices in the shape before a Reshape: axes are matched in the smallest groups of equal size; unchanged axes keep their indices."""
    indices: list[Place] = []
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
            indices += [same.get(k, Place()) for k in range(b, j)]
        else:
            indices += unflatten(compute_flat_offset(at[a:i], after[a:i], "linear"), before[b:j])
    return tuple(indices)
