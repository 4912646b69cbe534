"""Axis sizes as functions of how many units each group keeps: what cost models put in the place of a real cut."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from whet.network import Layer, Tensor
from whet.pruning.coupling import Axis, Group

Widths = Mapping[str, int]  # group name -> units that stay; groups that are not named stay whole


@dataclass(frozen=True)
class Part:
    """A group's share of one axis: `units` at full size, each taking `places` of it."""

    group: str
    units: int
    places: int


@dataclass
class Overlaps:
    """Which groups share places of an axis: the rows and columns of one product. They cut it by factors, others by sums."""

    pairs: set[tuple[str, str]] = field(default_factory=set)

    @staticmethod
    def of(found: Sequence[Group]) -> Overlaps:
        made = Overlaps()
        on: dict[Axis, list[tuple[str, np.ndarray]]] = {}
        for g in found:
            for axis, at in g.members.items():
                on.setdefault(axis, []).append((g.name, at))
        for here in on.values():
            for i, (a, at) in enumerate(here):
                for b, bt in here[i + 1 :]:
                    if (a, b) not in made.pairs and np.intersect1d(at, bt).size:
                        made.pairs |= {(a, b), (b, a)}
        return made

    def size(self, full: int, parts: Sequence[Part], widths: Widths) -> int:
        """The axis' size with `widths`. Of overlapping groups one may meet several (heads, and the widths of q and of v)."""
        size, done = full, set()
        for p in sorted(parts, key=lambda p: -sum((p.group, q.group) in self.pairs for q in parts)):
            if p.group in done:
                continue
            others = [q for q in parts if (p.group, q.group) in self.pairs and q.group not in done]
            done |= {p.group, *(q.group for q in others)}
            kept = widths.get(p.group, p.units) / p.units
            region = p.units * p.places
            inside = region - sum((q.units - widths.get(q.group, q.units)) * q.places for q in others)
            size -= region - round(kept * inside)
        return size


def source_parts(found: Sequence[Group]) -> dict[Axis, list[Part]]:
    """What each axis of the source network is made of, as far as it can be cut."""
    made: dict[Axis, list[Part]] = {}
    for g in found:
        for axis, at in g.members.items():
            made.setdefault(axis, []).append(Part(g.name, g.size, at.shape[1]))
    return made


def resized(layer: Layer, shapes: Mapping[Tensor, tuple]) -> Layer:
    """A detached copy of a layer whose tensors have other shapes; nothing is inferred or checked. For counting only."""
    made = Layer(layer.op, layer.name, (), layer.attrs, layer.regions, layer.sources)
    twins = {t: Tensor(t.name, t.type.with_shape(shapes.get(t, t.shape)), None, t.index) for t in (*layer.inputs, *layer.outputs) if t is not None}
    made.inputs = tuple(None if t is None else twins[t] for t in layer.inputs)
    made.outputs = tuple(twins[t] for t in layer.outputs)
    return made
