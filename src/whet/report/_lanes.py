"""Layout of a graph in execution order: one row per node, one lane per live tensor, as version-control tools draw histories."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Lanes:
    """`lane`: the column of each node. `edges`: (producer, consumer, lane of the tensor between them)."""

    lane: list[int]
    edges: list[tuple[int, int, int]]

    @property
    def width(self) -> int:
        """The number of lanes."""
        return 1 + max([*self.lane, *(e[2] for e in self.edges)], default=0)


def assign_lanes(nodes: Sequence[tuple[Sequence[str], Sequence[str]]]) -> Lanes:
    """Lanes of nodes given as (names of inputs, names of outputs), in execution order. Inputs that no earlier node writes are ignored.

    A tensor keeps its lane until its last consumer. That consumer takes the lowest lane that ends there, so a residual stays a straight line.
    """
    last: dict[str, int] = {}
    for k, (inputs, _) in enumerate(nodes):
        last.update(dict.fromkeys(inputs, k))
    made: dict[str, tuple[int, int]] = {}  # tensor -> (producer, lane)
    used: set[int] = set()
    lane: list[int] = []
    edges: list[tuple[int, int, int]] = []

    def free() -> int:
        return next(k for k in range(len(used) + 1) if k not in used)

    for k, (inputs, outputs) in enumerate(nodes):
        read = [t for t in dict.fromkeys(inputs) if t in made]
        ending = sorted({made[t][1] for t in read if last[t] == k})
        own = ending[0] if ending else free()
        edges += [(made[t][0], k, made[t][1]) for t in read]
        used.difference_update(ending)
        lane.append(own)
        for i, t in enumerate(t for t in outputs if last.get(t, -1) > k):
            at = own if i == 0 else free()
            used.add(at)
            made[t] = (k, at)
    return Lanes(lane, edges)
