"""Staircases: a network's latency over the widths of each group, one group at a time, and the step edges in them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from whet.builder.config import BuildConfig
from whet.network import Network
from whet.pruning.costs import Costs
from whet.pruning.coupling import Group, groups
from whet.pruning.depth import branches
from whet.pruning.knapsack import edges, widths_of
from whet.pruning.latency_cost import latency_costs, static_layers
from whet.pruning.latency_table import LatencyTable
from whet.pruning.meter import Meter

Progress = Callable[[int, int, str], None]


@dataclass(frozen=True)
class Staircase:
    """Milliseconds of the layers that a group touches, by the units that stay (ascending), all other groups whole; `edges` are the widths
    worth cutting to."""

    group: str
    widths: tuple[int, ...]
    ms: tuple[float, ...]
    edges: tuple[int, ...]


def staircases(
    net: Network, config: BuildConfig, table: LatencyTable, *, multiple: int = 8, most: int = 12, retime: bool = False,
    progress: Progress | None = None,
) -> tuple[list[Staircase], float]:  # fmt: skip
    """Every group's staircase, and the sum of all layers' times in ms. What the table knows is not timed again, unless by `retime`, or where it
    was timed while others used the CPUs and these rest now.

    Raises PruneError where a layer cannot be timed at full size, BackendError where the machine is missing.
    """
    found: Sequence[Group] = groups(net)
    base = static_layers(net, config)
    offered = [(g, widths_of(g, multiple, most)) for g in found]
    with Meter(config, table, base, retime=retime) as meter:
        made, total = _stairs(latency_costs(net, found, branches(net), meter, base, progress), offered, progress)
        if meter.settle():
            made, total = _stairs(latency_costs(net, found, branches(net), meter, base, progress), offered, progress)
    return made, total


def _stairs(costs: Costs, offered: Sequence[tuple[Group, list[int]]], progress: Progress | None) -> tuple[list[Staircase], float]:
    """The staircases of groups at the widths offered, and what the whole network costs."""
    made, total = [], costs.total({})
    done, count = 0, sum(len(widths) for _, widths in offered)
    for g, widths in offered:
        items, times = costs.items_of.get(g.name, ()), []
        costs.expect((i, {g.name: w}) for w in widths for i in items)
        for w in widths:
            times.append(sum(costs.item(i, {g.name: w}) for i in items))
            done += 1
            if progress is not None:
                progress(done, count, f"{g.name} at {w} of {g.size}")
        made.append(Staircase(g.name, tuple(widths), tuple(times), tuple(edges(widths, times))))
    return made, total
