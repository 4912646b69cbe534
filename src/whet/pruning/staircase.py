"""Staircases: latency over the widths of each group, varied one group at a time, and their step edges."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from whet.builder.config import BuildConfig
from whet.network import Network
from whet.pruning.costs import Costs
from whet.pruning.coupling import Group, groups
from whet.pruning.depth import branches
from whet.pruning.knapsack import find_edges, list_widths
from whet.pruning.latency_cost import lower_to_static_layers, make_latency_costs
from whet.pruning.latency_table import LatencyTable
from whet.pruning.meter import Meter

Progress = Callable[[int, int, str], None]


@dataclass(frozen=True)
class Staircase:
    """Milliseconds of the layers that a group affects, by kept units (ascending), all other groups whole; `edges` are the widths
    just below a step in latency."""

    group: str
    widths: tuple[int, ...]
    ms: tuple[float, ...]
    edges: tuple[int, ...]


def compute_staircases(
    net: Network, config: BuildConfig, table: LatencyTable, *, multiple: int = 8, most: int = 12, retime: bool = False,
    progress: Progress | None = None,
) -> tuple[list[Staircase], float]:  # fmt: skip
    """Each group's staircase, and the sum of all layer times in ms. Rows of the table are re-timed only with `retime`, or if they were timed
    under external load that is gone now.

    Raises PruneError if a layer cannot be timed at full size, BackendError if the device is missing.
    """
    found: Sequence[Group] = groups(net)
    base = lower_to_static_layers(net, config)
    offered = [(g, list_widths(g, multiple, most)) for g in found]
    with Meter(config, table, base, retime=retime) as meter:
        steps, total = _compute_stairs(make_latency_costs(net, found, branches(net), meter, base, progress), offered, progress)
        if meter.settle():
            steps, total = _compute_stairs(make_latency_costs(net, found, branches(net), meter, base, progress), offered, progress)
    return steps, total


def _compute_stairs(costs: Costs, offered: Sequence[tuple[Group, list[int]]], progress: Progress | None) -> tuple[list[Staircase], float]:
    """The staircases of the groups at the given widths, and the cost of the whole network."""
    steps, total = [], costs.total({})
    done, count = 0, sum(len(widths) for _, widths in offered)
    for g, widths in offered:
        items, times = costs.items_of.get(g.name, ()), []
        costs.expect((i, {g.name: w}) for w in widths for i in items)
        for w in widths:
            times.append(sum(costs.item(i, {g.name: w}) for i in items))
            done += 1
            if progress is not None:
                progress(done, count, f"{g.name} at {w} of {g.size}")
        steps.append(Staircase(g.name, tuple(widths), tuple(times), tuple(find_edges(widths, times))))
    return steps, total
