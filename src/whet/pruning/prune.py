"""prune(): choose, cut and recover in one call; what `whet prune` runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field

import numpy as np

from whet.errors import PruneError
from whet.network import Network
from whet.pruning.coupling import groups
from whet.pruning.cut import cut
from whet.pruning.importance import choose, importance
from whet.pruning.recipe import Recipe, recipe_of
from whet.pruning.recovery import Progress, RecoveryConfig, recover


@dataclass(frozen=True, kw_only=True)
class PruneConfig:
    """Which channels go, and how the rest recovers; `whet prune` reads its flags off these fields."""

    ratio: float = 0.4  # share of all channels to cut
    importance: str = "l1"  # l1 | l2 | random
    scope: str = "global"  # global: the least important of all groups together; group: the same share of every group
    multiple: int = 8  # kept channels of a group are a multiple of this
    skip: tuple[str, ...] = ()  # groups that stay whole, by name
    seed: int = 0
    recovery: RecoveryConfig = field(default_factory=RecoveryConfig)


@dataclass(frozen=True)
class Pruned:
    """What came of it: the network before recovery (`cut`), the one to use, the recipe, and channels before and after."""

    network: Network
    cut: Network
    recipe: Recipe
    channels: tuple[int, int]

    @property
    def share(self) -> float:
        """Share of the channels that were cut; rounding to multiples moves it away from the ratio asked for."""
        before, after = self.channels
        return (before - after) / before if before else 0.0


def prune(
    net: Network, config: PruneConfig | None = None, data: Mapping[str, np.ndarray] | None = None, progress: Progress | None = None
) -> Pruned:
    """Cuts `net` and recovers it on `data` (inputs by name, no labels); without data nothing is recovered.

    Raises PruneError when nothing can be cut, or for options that make no sense; ShapeError for data that do not fit.
    """
    config = config or PruneConfig()
    every = groups(net)
    unknown = [name for name in config.skip if name not in {g.name for g in every}]
    if unknown:
        raise PruneError(f"there is no group {unknown[0]!r} to leave whole; the groups are {', '.join(g.name for g in every) or 'none'}")
    found = [g for g in every if g.name not in config.skip]
    if not found:
        raise PruneError(f"'{net.name}' has no channels that can be cut: each is tied to an input, an output or an op that needs it whole")
    kept = choose(found, importance(found, config.importance, config.seed), config.ratio, scope=config.scope, multiple=config.multiple)
    small = cut(net, kept, found)
    made = small if data is None else recover(small, net, kept, data, config.recovery, progress)
    about = {k: v for k, v in asdict(config).items() if k not in ("recovery", "skip")}
    before = sum(g.size for g in found)
    after = sum(len(kept[g.name]) if g.name in kept else g.size for g in found)
    return Pruned(made, small, recipe_of(net, kept, about=about, found=found), (before, after))
