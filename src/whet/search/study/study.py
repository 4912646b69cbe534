"""The Optuna study: which point comes next, and what came of each. One process writes it; it outlives a kill at any moment.

Nothing is in memory only: a trial exists once Optuna's SQLite file says so, its parameters are written one by one as they are drawn,
and its values in one transaction when its job has left a result. After a kill a trial that is still marked as running is either
finished in its folder (then its values are told) or not (then the same trial runs again).
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from whet.errors import BuildError, UsageError
from whet.search.recipe.space import Dimension, SearchSpace

if TYPE_CHECKING:
    import optuna

_NAME = "whet"


class Study:
    """Ask and tell. `misses` of a finished trial, kept as constraints, steer the sampler towards the target."""

    def __init__(self, path: Path, space: SearchSpace, *, higher_is_better: bool, sampler: str, seed: int, startup: int):
        self.optuna, self.space, self.path = optuna_module(), space, path
        with self._stored():
            storage = self.optuna.storages.RDBStorage(f"sqlite:///{path}", engine_kwargs={"connect_args": {"timeout": 60}})
            self.study: optuna.Study = self.optuna.create_study(
                storage=storage, study_name=_NAME, load_if_exists=True, directions=["minimize", "maximize" if higher_is_better else "minimize"]
            )
            self.study.sampler = _sampler(self.optuna, sampler, seed, startup)
        self.distributions = {d.name: self._distribution(d) for d in space.dimensions}

    @contextlib.contextmanager
    def _stored(self) -> Iterator[None]:
        """Optuna's notes on what is experimental in it are not for our users. Raises BuildError where its file cannot be read or written."""
        from sqlalchemy.exc import SQLAlchemyError

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                yield
            except (self.optuna.exceptions.StorageInternalError, SQLAlchemyError) as e:
                why = str(getattr(e.__cause__ or e, "orig", None) or e).splitlines()[0]
                raise BuildError(
                    f"the study {self.path} cannot be read or written: {why}. Make room, or mend it; then the same command goes on, and "
                    "loses one trial at most. (--fresh begins anew.)"
                ) from e

    def _distribution(self, d: Dimension) -> Any:
        if d.values:
            return self.optuna.distributions.CategoricalDistribution(d.values)
        top = d.least + int((d.most - d.least) / d.step + 1e-9) * d.step
        return self.optuna.distributions.FloatDistribution(d.least, round(top, 9), step=d.step)

    def enqueue(self, points: Sequence[Mapping[str, Any]]) -> None:
        """Points to try first; those that are there already are left alone."""
        with self._stored():
            for p in points:
                self.study.enqueue_trial(dict(p), skip_if_exists=True)

    def ask(self) -> tuple[int, dict[str, Any]]:
        """A new trial's number and parameters."""
        with self._stored():
            trial = self.study.ask()
            return trial.number, self._drawn(trial)

    def unfinished(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """Trials that were begun and not told: those of a killed process. Parameters that it had not drawn are drawn now."""
        with self._stored():
            running = self.study.get_trials(deepcopy=False, states=(self.optuna.trial.TrialState.RUNNING,))
        for found in running:
            with self._stored():
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
        with self._stored():
            trials = self.study.get_trials(deepcopy=False)
            if trials[number].state.is_finished():
                return
            trial = self.optuna.trial.Trial(self.study, trials[number]._trial_id)
            for name, value in about.items():
                trial.set_user_attr(name, value)
            if values is None:
                self.study.tell(number, state=self.optuna.trial.TrialState.FAIL)
            else:
                self.study.tell(number, values=list(values))

    def numbers(self) -> dict[int, str]:
        """State of all trials that were begun, by number: `running`, `complete`, `fail`."""
        with self._stored():
            return {t.number: t.state.name.lower() for t in self.study.get_trials(deepcopy=False) if t.state.name != "WAITING"}

    def params(self, number: int) -> dict[str, Any]:
        """The parameters of a trial that was drawn."""
        with self._stored():
            return dict(self.study.get_trials(deepcopy=False)[number].params)

    def attributes(self, number: int) -> dict[str, Any]:
        with self._stored():
            return dict(self.study.get_trials(deepcopy=False)[number].user_attrs)


def _misses(trial: Any) -> tuple[float, ...]:
    """Optuna's constraints: the misses of a trial; above zero is not wanted."""
    return tuple(trial.user_attrs.get("misses") or (0.0,))


def _sampler(optuna: Any, name: str, seed: int, startup: int) -> Any:
    """The sampler of a name; one that draws the same after a kill as without one."""
    from whet.search.study.samplers import Make, Repeatable

    made: dict[str, Make] = {
        "tpe": lambda s: optuna.samplers.TPESampler(seed=s, multivariate=True, n_startup_trials=startup, constraints_func=_misses),
        "nsga2": lambda s: optuna.samplers.NSGAIISampler(seed=s, population_size=max(startup, 8), constraints_func=_misses),
        "random": lambda s: optuna.samplers.RandomSampler(seed=s),
    }
    return Repeatable(made[name], seed)


def optuna_module() -> Any:
    try:
        import optuna
    except ImportError:
        raise UsageError("the search needs Optuna: pip install 'whet[search]'") from None
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna
