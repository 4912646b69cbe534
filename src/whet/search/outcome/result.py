"""What a search found, for those who deploy it and tell of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from whet.network import Network
from whet.search.outcome.folder import WorkFolder
from whet.search.outcome.verdicts import Judging, Trial
from whet.search.recipe.recipe import AutoRecipe
from whet.search.recipe.space import SearchSpace
from whet.search.recipe.targets import Check, met


@dataclass
class SearchResult:
    """What a search found. `final["rows"]` are the compared engines (the original first), `chosen` one of them; `checks` and `points`
    (cost, loss) belong to them."""

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
    seconds: float = 0.0  # of work on trials, over all calls

    @property
    def met(self) -> bool:
        """Whether the chosen engine meets the target."""
        return met(self.checks[self.chosen])
