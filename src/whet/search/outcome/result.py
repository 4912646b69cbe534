"""The result of a search, read by deployment and reports."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from whet.network import Network
from whet.search.outcome.folder import WorkFolder
from whet.search.outcome.verdicts import Judging, Trial
from whet.search.recipe.recipe import AutoRecipe
from whet.search.recipe.space import SearchSpace
from whet.search.recipe.targets import Check, are_met


@dataclass
class SearchResult:
    """The result of a search. `final["rows"]` are the compared engines (the original first), `chosen` the index of the chosen one; `checks`
    and `points` (cost, loss) have one item per row."""

    recipe: AutoRecipe
    folder: WorkFolder
    net: Network
    space: SearchSpace
    judging: Judging
    trials: list[Trial]
    final: dict[str, Any]
    chosen: int
    checks: list[list[Check]]
    points: list[tuple[float, float]]
    notes: list[str] = field(default_factory=list)
    seconds: float = 0.0  # work on trials, summed over all calls

    @property
    def met(self) -> bool:
        """True if the chosen engine meets the target."""
        return are_met(self.checks[self.chosen])
