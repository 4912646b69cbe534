"""Optuna's samplers made repeatable: what is drawn for a trial depends on the seed, its number and the trials before it, and on nothing else.

A sampler's random state is in memory only, so a search that was killed would draw other points than an unbroken one. Here each draw has a
sampler of its own, seeded by the study's seed and the trial's number; what a sampler learns from, it reads from the study anyway.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import optuna

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution
    from optuna.samplers import BaseSampler
    from optuna.trial import FrozenTrial, TrialState

Make = Callable[[int], "BaseSampler"]  # a seed -> a sampler


class Repeatable(optuna.samplers.BaseSampler):
    """Draws with a new sampler of `make` every time."""

    def __init__(self, make: Make, seed: int):
        self.make, self.seed = make, seed

    def _of(self, trial: FrozenTrial, what: str = "") -> BaseSampler:
        digest = hashlib.sha256(f"{self.seed}/{trial.number}/{what}".encode()).digest()
        return self.make(int.from_bytes(digest[:4], "little"))

    def infer_relative_search_space(self, study: optuna.Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        """The parameters that are drawn together."""
        return self._of(trial).infer_relative_search_space(study, trial)

    def sample_relative(self, study: optuna.Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]) -> dict[str, Any]:
        """Their values."""
        return self._of(trial).sample_relative(study, trial, search_space)

    def sample_independent(self, study: optuna.Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution) -> Any:
        """A parameter by itself; its name is part of the seed, so that two of one range differ."""
        return self._of(trial, param_name).sample_independent(study, trial, param_name, param_distribution)

    def before_trial(self, study: optuna.Study, trial: FrozenTrial) -> None:
        """As the sampler has it."""
        self._of(trial).before_trial(study, trial)

    def after_trial(self, study: optuna.Study, trial: FrozenTrial, state: TrialState, values: Sequence[float] | None) -> None:
        """As the sampler has it: it writes the trial's constraints into the study."""
        self._of(trial).after_trial(study, trial, state, values)
