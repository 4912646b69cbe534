"""What measured rows mean: their place in the plane of cost and metric, and what of the target they miss."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from whet.search.recipe.recipe import AutoRecipe
from whet.search.recipe.space import Candidate
from whet.search.recipe.targets import Check, checks

Row = Mapping[str, Any]


@dataclass
class Trial:
    """A scout: its number, its candidate, and its result once there is one. `same_as`: it came to the engine of another trial."""

    number: int
    candidate: Candidate
    result: dict[str, Any] | None = None
    same_as: int | None = None


@dataclass(frozen=True)
class Judging:
    """`baselines` are results of the original by `precision-bN`; `batches` those that are searched over."""

    recipe: AutoRecipe
    baselines: Mapping[str, Row]
    batches: tuple[int, ...]

    @property
    def cost_a_sample(self) -> bool:
        """Whether cost is milliseconds a sample (throughput or several batches are asked for) and not a run."""
        return len(self.batches) > 1 or (self.recipe.target.throughput is not None and self.recipe.target.latency is None)

    def original(self, batch: int) -> Row:
        """The original in FP32 at a batch."""
        return self.baselines[f"fp32-b{batch}"]

    def point(self, row: Row, batch: int) -> tuple[float, float]:
        """(cost, loss), both the smaller the better. Cost is the ratio to the original, taken in turns, times the original's own time.

        So a busy hour does not count against a trial.
        """
        ms = row["latency"]["ratio"] * self.original(batch)["latency"]["median_ms"]
        value = row["metric"]["value"]
        return (ms / batch if self.cost_a_sample else ms), (-value if self.recipe.higher_is_better else value)

    def trial_point(self, trial: Trial) -> tuple[float, float]:
        """The same of a trial that is done."""
        assert trial.result is not None
        return self.point(trial.result, trial.candidate.batch)

    def trial_checks(self, trial: Trial) -> list[Check]:
        """What the target says of a trial that is done."""
        assert trial.result is not None
        return checks(self.recipe.target, trial.result, self.original(trial.candidate.batch))
