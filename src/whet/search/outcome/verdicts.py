"""Evaluation of measured rows: cost, loss and missed targets."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from whet.search.recipe.recipe import AutoRecipe
from whet.search.recipe.space import Candidate
from whet.search.recipe.targets import Check, Measured, check_target

Row = Mapping[str, Any]


@dataclass
class Trial:
    """A scout: number, candidate and, once finished, its result. `same_as`: number of the trial with the same engine."""

    number: int
    candidate: Candidate
    result: dict[str, Any] | None = None
    same_as: int | None = None


@dataclass(frozen=True)
class Judging:
    """Evaluates rows. `baselines` are results of the original by `precision-bN`; `batches` are the searched batch sizes."""

    recipe: AutoRecipe
    baselines: Mapping[str, Row]
    batches: tuple[int, ...]

    @property
    def cost_a_sample(self) -> bool:
        """True if cost is in ms per sample (a throughput target or several batches), False if per run."""
        return len(self.batches) > 1 or (self.recipe.target.throughput is not None and self.recipe.target.latency is None)

    def original(self, batch: int) -> Row:
        """The FP32 original at a batch."""
        return self.baselines[f"fp32-b{batch}"]

    def point(self, row: Row, batch: int) -> tuple[float, float]:
        """(cost, loss), both lower is better. Cost is the interleaved ratio to the original times the original's time in ms.

        External load therefore does not count against a trial.
        """
        ms = row["latency"]["ratio"] * self.original(batch)["latency"]["median_ms"]
        value = row["metric"]["value"]
        return (ms / batch if self.cost_a_sample else ms), (-value if self.recipe.higher_is_better else value)

    def measured(self, row: Row, batch: int) -> Measured:
        """`point` with its intervals; a value without an interval counts as exact."""
        cost, loss = self.point(row, batch)
        ratio, metric = row["latency"]["ratio"], row["metric"]
        low, high = row["latency"].get("ratio_interval") or (ratio, ratio)
        bounds = [metric["value"] if metric.get(k) is None else metric[k] for k in ("low", "high")]
        losses = sorted(-b if self.recipe.higher_is_better else b for b in bounds)
        return Measured((cost, loss), (cost * low / ratio, cost * high / ratio), (losses[0], losses[1]))

    def trial_point(self, trial: Trial) -> tuple[float, float]:
        """`point` of a finished trial."""
        assert trial.result is not None
        return self.point(trial.result, trial.candidate.batch)

    def trial_checks(self, trial: Trial) -> list[Check]:
        """Target checks of a finished trial."""
        assert trial.result is not None
        return check_target(self.recipe.target, trial.result, self.original(trial.candidate.batch))
