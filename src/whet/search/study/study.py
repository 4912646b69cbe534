"""The Optuna study: selects the next point and records the values. One process writes it; it survives a kill at any time.

No state is in memory only: a trial exists once it is in Optuna's SQLite file, its parameters are written one by one as they are drawn,
and its values in one transaction when its job has a result. After a kill, a trial marked as running either has a result in its folder
(which is then recorded) or runs again.
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

    from whet.search.study.surrogate import Reference

_NAME = "whet"


class Study:
    """Ask-and-tell interface. `misses` of finished trials are constraints that steer the sampler towards the target."""

    def __init__(
        self, path: Path, space: SearchSpace, *, higher_is_better: bool, sampler: str, seed: int, startup: int, reference: Reference | None = None
    ):  # fmt: skip
        """`reference` bounds the costs and losses of interest, for the sampler `gp`."""
        self.optuna, self.space, self.path = import_optuna(), space, path
        with self._translate_errors():
            storage = self.optuna.storages.RDBStorage(f"sqlite:///{path}", engine_kwargs={"connect_args": {"timeout": 60}})
            self.study: optuna.Study = self.optuna.create_study(
                storage=storage, study_name=_NAME, load_if_exists=True, directions=["minimize", "maximize" if higher_is_better else "minimize"]
            )
            sign = -1 if higher_is_better else 1
            self.study.sampler = make_sampler(self.optuna, sampler, seed, startup, sign, reference)
        self.distributions = {d.name: self._distribution(d) for d in space.dimensions}

    @contextlib.contextmanager
    def _translate_errors(self) -> Iterator[None]:
        """Suppresses Optuna's warnings on experimental features. Raises BuildError if the study file cannot be read or written."""
        from sqlalchemy.exc import SQLAlchemyError

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                yield
            except (self.optuna.exceptions.StorageInternalError, SQLAlchemyError) as e:
                why = str(getattr(e.__cause__ or e, "orig", None) or e).splitlines()[0]
                raise BuildError(
                    f"the study {self.path} cannot be read or written: {why}. Free disk space or repair the file; the same command then "
                    "resumes and loses at most one trial. (--fresh restarts.)"
                ) from e
            except (RuntimeError, LookupError, ValueError, TypeError, AttributeError, AssertionError) as e:
                why = (str(e) or type(e).__name__).splitlines()[0][:300]
                raise BuildError(
                    f"the study {self.path} holds values that Optuna {self.optuna.__version__} does not write: {why}. Restore the file, use the "
                    "version of Optuna that wrote it, or restart the search with --fresh."
                ) from e

    def _distribution(self, d: Dimension) -> Any:
        if d.values:
            return self.optuna.distributions.CategoricalDistribution(d.values)
        top = d.least + int((d.most - d.least) / d.step + 1e-9) * d.step
        return self.optuna.distributions.FloatDistribution(d.least, round(top, 9), step=d.step)

    def enqueue(self, points: Sequence[Mapping[str, Any]]) -> None:
        """Queues points to try first; points already in the study are skipped."""
        with self._translate_errors():
            for p in points:
                self.study.enqueue_trial(dict(p), skip_if_exists=True)

    def ask(self) -> tuple[int, dict[str, Any]]:
        """Starts a trial and returns its number and parameters."""
        with self._translate_errors():
            trial = self.study.ask()
            return trial.number, self._drawn(trial)

    def list_unfinished(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """Running trials without values, left by a killed process; missing parameters are drawn now."""
        with self._translate_errors():
            running = self.study.get_trials(deepcopy=False, states=(self.optuna.trial.TrialState.RUNNING,))
        for trials in running:
            with self._translate_errors():
                trial = self.optuna.trial.Trial(self.study, trials._trial_id)
                drawn = self._drawn(trial)
            yield trials.number, drawn

    def _drawn(self, trial: Any) -> dict[str, Any]:
        params = {}
        for name, d in self.distributions.items():
            if isinstance(d, self.optuna.distributions.CategoricalDistribution):
                params[name] = trial.suggest_categorical(name, d.choices)
            else:
                params[name] = trial.suggest_float(name, d.low, d.high, step=d.step)
        return params

    def tell(self, number: int, values: tuple[float, float] | None, attributes: Mapping[str, Any]) -> None:
        """Records a trial's (cost, metric), or None for a failure. `attributes` becomes its attributes; repeated calls have no effect."""
        with self._translate_errors():
            trials = self.study.get_trials(deepcopy=False)
            if trials[number].state.is_finished():
                return
            trial = self.optuna.trial.Trial(self.study, trials[number]._trial_id)
            for name, value in attributes.items():
                trial.set_user_attr(name, value)
            if values is None:
                self.study.tell(number, state=self.optuna.trial.TrialState.FAIL)
            else:
                self.study.tell(number, values=list(values))

    def numbers(self) -> dict[int, str]:
        """State of all started trials by number: `running`, `complete`, `fail`."""
        with self._translate_errors():
            return {t.number: t.state.name.lower() for t in self.study.get_trials(deepcopy=False) if t.state.name != "WAITING"}

    def params(self, number: int) -> dict[str, Any]:
        """The parameters of a trial."""
        with self._translate_errors():
            return dict(self.study.get_trials(deepcopy=False)[number].params)

    def attributes(self, number: int) -> dict[str, Any]:
        with self._translate_errors():
            return dict(self.study.get_trials(deepcopy=False)[number].user_attrs)


def _get_misses(trial: Any) -> tuple[float, ...]:
    """Optuna's constraints: a trial's misses; values above zero are violations."""
    return tuple(trial.user_attrs.get("misses") or (0.0,))


def make_sampler(optuna: Any, name: str, seed: int, startup: int, sign: int, reference: Reference | None) -> Any:
    """A sampler by name, deterministic across kills. `sign` turns the metric into a loss."""
    from whet.search.study.samplers import Make, Repeatable
    from whet.search.study.surrogate import SurrogateSampler

    made: dict[str, Make] = {
        "gp": lambda s: SurrogateSampler(s, startup, reference, sign),
        "tpe": lambda s: optuna.samplers.TPESampler(seed=s, multivariate=True, n_startup_trials=startup, constraints_func=_get_misses),
        "nsga2": lambda s: optuna.samplers.NSGAIISampler(seed=s, population_size=max(startup, 8), constraints_func=_get_misses),
        "random": lambda s: optuna.samplers.RandomSampler(seed=s),
    }
    return Repeatable(made[name], seed)


def import_optuna() -> Any:
    try:
        import optuna
    except ImportError:
        raise UsageError("the search needs Optuna: pip install 'whet[search]'") from None
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna
