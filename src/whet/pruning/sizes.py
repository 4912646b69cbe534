"""Axis sizes as functions of the kept units per group, so that cost models need no actual cut."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from whet.network import Layer, Tensor
from whet.pruning.coupling import Axis, Group

Widths = Mapping[str, int]  # group name -> kept units; unlisted groups keep all


@dataclass(frozen=True)
class Part:
    """A group's share of one axis: `units` at full size with `places` elements each."""

    group: str
    units: int
    places: int


@dataclass
class Overlaps:
    """Pairs of groups that share elements of an axis (rows and columns of one product). Their cuts multiply; those of other groups add."""

    pairs: set[tuple[str, str]] = field(default_factory=set)

    @staticmethod
    def of(channel_groups: Sequence[Group]) -> Overlaps:
        overlaps = Overlaps()
        on: dict[Axis, list[tuple[str, np.ndarray]]] = {}
        for g in channel_groups:
            for axis, at in g.members.items():
                on.setdefault(axis, []).append((g.name, at))
        for here in on.values():
            for i, (a, at) in enumerate(here):
                for b, bt in here[i + 1 :]:
                    if (a, b) not in overlaps.pairs and np.intersect1d(at, bt).size:
                        overlaps.pairs |= {(a, b), (b, a)}
        return overlaps

    def size(self, full: int, parts: Sequence[Part], widths: Widths) -> int:
        """The axis size at `widths`. A group may overlap with several others, which may overlap too (key heads with their queries, the repetitions
        of keys, widths) or not (heads with the widths of q and of v)."""
        size, done = full, set()
        for p in sorted(parts, key=lambda p: (-sum((p.group, q.group) in self.pairs for q in parts), -p.units * p.places)):
            if p.group in done:
                continue
            others = [q for q in parts if (p.group, q.group) in self.pairs and q.group not in done]
            done |= {p.group, *(q.group for q in others)}
            kept = widths.get(p.group, p.units) / p.units
            region = p.units * p.places
            size -= region - round(kept * self.size(region, others, widths))
        return size


def factor_counts(channel_groups: Sequence[Group]) -> dict[str, int]:
    """For each group the largest number of groups, itself included, whose units share elements of one axis: the factors of a product axis."""
    most = {g.name: 1 for g in channel_groups}
    on: dict[Axis, list[tuple[str, np.ndarray]]] = {}
    for g in channel_groups:
        for axis, at in g.members.items():
            on.setdefault(axis, []).append((g.name, at))
    for here in on.values():
        for a, at in here if len(here) > 1 else ():
            most[a] = max(most[a], sum(a == b or bool(np.intersect1d(at, bt).size) for b, bt in here))
    return most


def collect_source_parts(channel_groups: Sequence[Group]) -> dict[Axis, list[Part]]:
    """The groups' parts of each prunable axis of the source network."""
    parts: dict[Axis, list[Part]] = {}
    for g in channel_groups:
        for axis, at in g.members.items():
            parts.setdefault(axis, []).append(Part(g.name, g.size, at.shape[1]))
    return parts


def resize_layer(layer: Layer, shapes: Mapping[Tensor, tuple]) -> Layer:
    """A detached copy of a layer with other tensor shapes, without inference or checks. For counting only."""
    copy = Layer(layer.op, layer.name, (), layer.attrs, layer.regions, layer.sources)
    twins = {t: Tensor(t.name, t.type.with_shape(shapes.get(t, t.shape)), None, t.index) for t in (*layer.inputs, *layer.outputs) if t is not None}
    copy.inputs = tuple(None if t is None else twins[t] for t in layer.inputs)
    copy.outputs = tuple(twins[t] for t in layer.outputs)
    return copy
