"""The Optuna study: which point comes next, and what came of each. One process writes it; it outlives a kill at any moment.

Nothing is in memory only: a trial exists once Optuna's SQLite file says so, its parameters are written one by one as they are drawn,
and its values in one transaction when its job has left a result. After a kill a trial that is still marked as running is either
finished in its folder (then its values are told) or not (then the same trial runs again).
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from whet.errors import UsageError
from whet.search.space import Dimension, SearchSpace

if TYPE_CHECKING:
    import optuna

_NAME = "whet"


class Study:
    """Ask and tell. `misses` of a finished trial, kept as constraints, steer the sampler towards the target."""

    def __init__(self, path: Path, space: SearchSpace, *, higher_is_better: bool, sampler: str, seed: int, startup: int):
        self.optuna, self.space = _optuna(), space
        with _quiet():
            storage = self.optuna.storages.RDBStorage(f"sqlite:///{path}", engine_kwargs={"connect_args": {"timeout": 60}})
            self.study: optuna.Study = self.optuna.create_study(
                storage=storage, study_name=_NAME, load_if_exists=True, directions=["minimize", "maximize" if higher_is_better else "minimize"]
            )
            # a sampler has no memory on disk: a resumed search draws other points than an unbroken one would have
            self.study.sampler = _sampler(self.optuna, sampler, seed + 1000003 * len(self.study.get_trials(deepcopy=False)), startup)
        self.distributions = {d.name: self._distribution(d) for d in space.dimensions}

    def _distribution(self, d: Dimension) -> Any:
        if d.values:
            return self.optuna.distributions.CategoricalDistribution(d.values)
        top = d.least + int((d.most - d.least) / d.step + 1e-9) * d.step
        return self.optuna.distributions.FloatDistribution(d.least, round(top, 9), step=d.step)

    def enqueue(self, points: Sequence[Mapping[str, Any]]) -> None:
        """Points to try first; those that are there already are left alone."""
        with _quiet():
            for p in points:
                self.study.enqueue_trial(dict(p), skip_if_exists=True)

    def ask(self) -> tuple[int, dict[str, Any]]:
        """A new trial's number and parameters."""
        with _quiet():
            trial = self.study.ask()
            return trial.number, self._drawn(trial)

    def unfinished(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """Trials that were begun and not told: those of a killed process. Parameters that it had not drawn are drawn now."""
        with _quiet():
            running = self.study.get_trials(deepcopy=False, states=(self.optuna.trial.TrialState.RUNNING,))
        for found in running:
            with _quiet():
                trial = self.optuna.trial.Trial(self.study, found._trial_id)
                drawn = self._drawn(trial)
            yield found.number, drawn

    def _drawn(self, trial: Any) -> dict[str, Any]:
        made = {}
        for name, d in self.distributions.items():
            if isinstance(d, self.optuna.distributions.CategoricalDistribution):
                made[name] = trial.suggest_categorical(name, d.choices)
            else:
                made[name] = trial.suggest_float(name, d.low, d.high, step=d.step)
        return made

    def tell(self, number: int, values: tuple[float, float] | None, about: Mapping[str, Any]) -> None:
        """What came of a trial: (cost, metric), or None when it failed. `about` becomes its attributes; telling twice changes nothing."""
        trials = self.study.get_trials(deepcopy=False)
        if trials[number].state.is_finished():
            return
        with _quiet():
            trial = self.optuna.trial.Trial(self.study, trials[number]._trial_id)
            for name, value in about.items():
                trial.set_user_attr(name, value)
            if values is None:
                self.study.tell(number, state=self.optuna.trial.TrialState.FAIL)
            else:
                self.study.tell(number, values=list(values))

    def numbers(self) -> dict[int, str]:
        """State of all trials that were begun, by number: `running`, `complete`, `fail`."""
        with _quiet():
            return {t.number: t.state.name.lower() for t in self.study.get_trials(deepcopy=False) if t.state.name != "WAITING"}

    def attributes(self, number: int) -> dict[str, Any]:
        return dict(self.study.get_trials(deepcopy=False)[number].user_attrs)


def _misses(trial: Any) -> tuple[float, ...]:
    """Optuna's constraints: the misses of a trial; above zero is not wanted."""
    return tuple(trial.user_attrs.get("misses") or (0.0,))


def _sampler(optuna: Any, name: str, seed: int, startup: int) -> Any:
    made: dict[str, Callable[[], Any]] = {
        "tpe": lambda: optuna.samplers.TPESampler(seed=seed, multivariate=True, n_startup_trials=startup, constraints_func=_misses),
        "nsga2": lambda: optuna.samplers.NSGAIISampler(seed=seed, population_size=max(startup, 8), constraints_func=_misses),
        "random": lambda: optuna.samplers.RandomSampler(seed=seed),
    }
    return made[name]()


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Optuna's notes on what is experimental in it are not for our users."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _optuna() -> Any:
    try:
        import optuna
    except ImportError:
        raise UsageError("the search needs Optuna: pip install 'whet[search]'") from None
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna
