"""Deterministic Optuna samplers: a trial's parameters depend only on the seed, the trial number and the earlier trials.

A sampler's random state is in memory only, so a killed and resumed search would draw other points than an uninterrupted one. Here each draw
uses a new sampler seeded by the study's seed and the trial number; samplers read the history from the study.
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
    """Creates a new sampler with `make` for every draw."""

    def __init__(self, make: Make, seed: int):
        self.make, self.seed = make, seed

    def _make_sampler(self, trial: FrozenTrial, parameter: str = "") -> BaseSampler:
        digest = hashlib.sha256(f"{self.seed}/{trial.number}/{parameter}".encode()).digest()
        return self.make(int.from_bytes(digest[:4], "little"))

    def infer_relative_search_space(self, study: optuna.Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        """The parameters sampled jointly."""
        return self._make_sampler(trial).infer_relative_search_space(study, trial)

    def sample_relative(self, study: optuna.Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]) -> dict[str, Any]:
        """Values of the jointly sampled parameters."""
        return self._make_sampler(trial).sample_relative(study, trial, search_space)

    def sample_independent(self, study: optuna.Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution) -> Any:
        """The value of one parameter; its name is part of the seed, so that parameters with equal ranges differ."""
        return self._make_sampler(trial, param_name).sample_independent(study, trial, param_name, param_distribution)

    def before_trial(self, study: optuna.Study, trial: FrozenTrial) -> None:
        """Forwards to the sampler."""
        self._make_sampler(trial).before_trial(study, trial)

    def after_trial(self, study: optuna.Study, trial: FrozenTrial, state: TrialState, values: Sequence[float] | None) -> None:
        """Forwards to the sampler, which writes the trial's constraints into the study."""
        self._make_sampler(trial).after_trial(study, trial, state, values)
