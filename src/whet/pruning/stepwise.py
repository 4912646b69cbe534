"""A selection in several steps: cut a part, recover, score the recovered network, cut on.

Scores describe the network that they were measured on: after a deep cut other channels matter. The intermediate networks serve the scores only; the
final cut is made from the original, and recovered towards it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from whet.network import Network
from whet.pruning.coupling import Group, list_groups_for
from whet.pruning.cut import cut
from whet.pruning.knapsack import Choice
from whet.pruning.recovery import Progress, RecoveryConfig, recover

Select = Callable[[Network, Sequence[Group], float], Choice]
"""select(network, its groups, progress of the cut from 0 to 1) -> choice for this network"""


def choose_stepwise(
    net: Network,
    channel_groups: Sequence[Group],
    select: Select,
    steps: int,
    data: Mapping[str, np.ndarray],
    recovery: RecoveryConfig,
    progress: Progress | None = None,
) -> tuple[dict[str, np.ndarray], tuple[str, ...]]:
    """The kept units by group and the removed branches of `net` after `steps` selections.

    A group of which a step leaves nothing more to cut, or that a removed branch contains, keeps what it has.
    """
    kept: dict[str, np.ndarray] = {}
    removed: tuple[str, ...] = ()
    present = net
    sizes = {g.name: g.size for g in channel_groups}
    for n in range(1, steps + 1):
        here = channel_groups if present is net else list_remaining_groups(channel_groups, present, {name: len(at) for name, at in kept.items()})
        choice = select(present, here, n / steps)
        for name, at in choice.kept.items():
            kept[name] = kept.get(name, np.arange(sizes[name]))[at]
        removed += choice.removed
        if n < steps:
            small = cut(net, kept, channel_groups, removed=removed)
            present = recover(small, net, kept, data, recovery, progress, insist=True)
    return kept, removed


def list_remaining_groups(channel_groups: Sequence[Group], present: Network, wanted: Mapping[str, int]) -> list[Group]:
    """The groups of `present` that are groups of the original too (`channel_groups`), with the numbers of units in `wanted` (else their own)."""
    sizes = {g.name: wanted.get(g.name, g.size) for g in channel_groups}
    return [g for g in list_groups_for(present, sizes) if sizes.get(g.name) == g.size]
