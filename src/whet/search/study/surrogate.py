"""A sampler that models cost and loss by Gaussian processes and draws the point with the largest expected gain of hypervolume.

Trials of a search are few (tens) and its dimensions ordered (shares to cut), so a smooth model learns more from each than the densities of a TPE:
cost is nearly linear in the shares, and loss grows slowly up to a cliff.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import optuna

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution
    from optuna.trial import FrozenTrial

_POOL = 512  # random points among which the next one is selected; as many again are close to the best
_DRAWS = 32  # samples of the model's prediction at each of them
_SCALES = (0.3, 0.6, 1.2, 2.4)  # length scales, as multiples of the diagonal of the space
_SWEEPS, _FACTORS = 2, (0.25, 0.5, 2.0, 4.0)  # refinement of each coordinate's length scale
_NOISES = (1e-4, 1e-2, 1e-1)  # variance of a measurement relative to that of the values
_TREND = 4.0  # prior variance of a slope of the linear trend
_LEAST = 3  # finished trials from which the model is used


@dataclass(frozen=True)
class Reference:
    """The point that bounds the hypervolume: the original's cost and the largest loss of interest; `scale` is a small loss."""

    cost: float
    loss: float
    scale: float


class SurrogateSampler(optuna.samplers.BaseSampler):
    """Random until `startup` trials have finished, then the largest expected improvement of the hypervolume below `reference`.

    Values of a trial are (cost, metric); `sign` turns the metric into a loss: -1 if a higher one is better.
    """

    def __init__(self, seed: int, startup: int, reference: Reference | None = None, sign: int = -1):
        self.rng, self.startup, self.reference, self.sign = np.random.default_rng(seed), max(startup, _LEAST), reference, sign
        self._independent = optuna.samplers.RandomSampler(seed=seed)

    def infer_relative_search_space(self, study: optuna.Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        """All dimensions, once enough trials have finished."""
        done = _list_trials(study, optuna.trial.TrialState.COMPLETE)
        return optuna.search_space.intersection_search_space(done) if len(done) >= self.startup else {}

    def sample_independent(self, study: optuna.Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution) -> Any:
        """A random value."""
        return self._independent.sample_independent(study, trial, param_name, param_distribution)

    def sample_relative(self, study: optuna.Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]) -> dict[str, Any]:
        """The point with the largest expected improvement among random ones and points close to the best."""
        if not search_space:
            return {}
        done = _list_trials(study, optuna.trial.TrialState.COMPLETE)
        failed = _list_trials(study, optuna.trial.TrialState.FAIL)
        running = [
            t for t in _list_trials(study, optuna.trial.TrialState.RUNNING) if t.number != trial.number and search_space.keys() <= t.params.keys()
        ]
        space = Encoding(search_space)
        points = np.array([space.indices(t.params) for t in done])
        values = np.array([(t.values[0], self.sign * t.values[1]) for t in done])
        reference = self.reference or Reference(values[:, 0].max(), float(np.median(values[:, 1])), max(float(np.ptp(values[:, 1])) / 50, 1e-9))
        best = points[_find_front(values)]
        pool = self._pool(space, best)
        tried = {tuple(p) for p in [*points, *(space.indices(t.params) for t in [*failed, *running] if search_space.keys() <= t.params.keys())]}
        pool = np.array([p for p in pool if tuple(p) not in tried] or pool)
        waiting = np.array([space.indices(t.params) for t in running]).reshape(len(running), len(space.names))
        asked = space.encode(np.concatenate([pool, waiting]) if len(running) else pool)
        draws = self._draws(space.encode(points), values, asked, reference)
        if len(running):  # a running trial counts as finished with the predicted values, so that the next one looks elsewhere
            values = np.concatenate([values, draws[:, len(pool) :].mean(0)])
        gains = compute_improvements(draws[:, : len(pool)].reshape(-1, 2), values, (reference.cost, reference.loss)).reshape(_DRAWS, -1).mean(0)
        if not gains.any():  # nothing within reach of the reference: towards the smallest distance from it
            gains = -np.maximum(draws[:, : len(pool), 1].mean(0) - reference.loss, 0) / reference.scale
        return space.params(pool[int(np.argmax(gains))])

    def _pool(self, space: Encoding, best: np.ndarray) -> np.ndarray:
        """Random points, and points that differ from the best in one to three dimensions."""
        sizes = np.array(space.sizes)
        anywhere = self.rng.integers(0, sizes, (_POOL, len(sizes)))
        near = best[self.rng.integers(0, len(best), _POOL)].copy()
        changes = self.rng.random(near.shape) < self.rng.uniform(1, 3, (_POOL, 1)) / len(sizes)
        steps = self.rng.choice([-2, -1, 1, 2], near.shape)
        moved = np.where(space.ordered, np.clip(near + steps, 0, sizes - 1), self.rng.integers(0, sizes, near.shape))
        return np.unique(np.concatenate([anywhere, np.where(changes, moved, near)]), axis=0)

    def _draws(self, x: np.ndarray, values: np.ndarray, points: np.ndarray, reference: Reference) -> np.ndarray:
        """Samples of (cost, loss) [draws, points, 2]. Losses are modelled on a logarithmic scale above the least one, since they have a cliff."""
        least = values[:, 1].min()
        made = []
        for y, back in (
            (values[:, 0], lambda v: v),
            (np.log1p((values[:, 1] - least) / reference.scale), lambda v: least + reference.scale * np.expm1(np.clip(v, -1, 20))),
        ):
            mean, deviation = predict(x, y, points)
            made.append(back(mean + deviation * self.rng.standard_normal((_DRAWS, len(points)))))
        return np.stack(made, axis=2)


class Encoding:
    """The dimensions as indices of values and as coordinates from 0 to 1 (one coordinate for each value of a categorical dimension)."""

    def __init__(self, space: Mapping[str, BaseDistribution]):
        self.names = list(space)
        self.values = [_list_values(d) for d in space.values()]
        self.ordered = np.array([_is_ordered(d) for d in space.values()])
        self.sizes = [len(v) for v in self.values]

    def indices(self, params: Mapping[str, Any]) -> list[int]:
        """The index of each dimension's value."""
        return [
            int(np.argmin([abs(v - params[name]) for v in values])) if ordered else values.index(params[name])
            for name, values, ordered in zip(self.names, self.values, self.ordered, strict=True)
        ]

    def params(self, indices: Sequence[int]) -> dict[str, Any]:
        """The values by name."""
        return {name: values[int(i)] for name, values, i in zip(self.names, self.values, indices, strict=True)}

    def encode(self, indices: np.ndarray) -> np.ndarray:
        """float64 [points, coordinates]."""
        columns = []
        for k, n in enumerate(self.sizes):
            at = indices[:, k]
            columns += [at / max(n - 1, 1)] if self.ordered[k] else [(at == i) / np.sqrt(2) for i in range(n)]
        return np.stack(columns, axis=1)


def predict(x: np.ndarray, y: np.ndarray, points: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mean and standard deviation at `points` of a Gaussian process with a linear trend, fitted to (x, y) by its marginal likelihood.

    Each coordinate has a length scale of its own, since some hardly matter: coordinate descent from a common scale (Rasmussen and Williams,
    Gaussian Processes for Machine Learning, section 5.1).
    """
    middle, spread = y.mean(), max(float(y.std()), 1e-12)
    scaled = (y - middle) / spread
    lengths, root = _fit(x, scaled)
    across = np.linalg.solve(root, _compute_covariance(x, points, lengths))
    mean = across.T @ np.linalg.solve(root, scaled)
    variance = np.maximum(1 + _TREND * ((points - 0.5) ** 2).sum(1) - (across**2).sum(0), 1e-12)
    return middle + spread * mean, spread * np.sqrt(variance)


def _fit(x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The length scales of the coordinates and the Cholesky factor of the covariance of `x` under which `y` is likeliest."""
    diagonal = np.sqrt(x.shape[1])
    best: tuple[float, np.ndarray, np.ndarray] | None = None

    def attempt(lengths: np.ndarray) -> None:
        nonlocal best
        plain = _compute_covariance(x, x, lengths)
        for noise in _NOISES:
            root = np.linalg.cholesky(plain + (noise + 1e-8) * np.eye(len(x)))
            white = np.linalg.solve(root, y)
            likelihood = -0.5 * float(white @ white) - float(np.log(np.diag(root)).sum())
            if best is None or likelihood > best[0]:
                best = likelihood, lengths, root

    for scale in _SCALES:
        attempt(np.full(x.shape[1], scale * diagonal))
    assert best is not None
    for _ in range(_SWEEPS):
        for k in range(x.shape[1]):
            lengths = best[1]
            for factor in _FACTORS:
                attempt(np.where(np.arange(len(lengths)) == k, lengths[k] * factor, lengths))
    return best[1], best[2]


def _compute_covariance(a: np.ndarray, b: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Of a linear trend around the middle of the space plus a smooth function with a length scale for each coordinate."""
    p, q = a / lengths, b / lengths
    squares = np.maximum((p**2).sum(1)[:, None] + (q**2).sum(1)[None] - 2 * p @ q.T, 0)
    return _TREND * (a - 0.5) @ (b - 0.5).T + np.exp(-squares / 2)


def compute_improvements(points: np.ndarray, values: np.ndarray, reference: tuple[float, float]) -> np.ndarray:
    """The hypervolume (area below `reference`) that each of `points` [n, 2] adds to that of `values`; lower is better in both columns."""
    at = values[_find_front(values)]
    at = at[(at < reference).all(1)]
    costs = np.concatenate([[-np.inf], at[:, 0], [reference[0]]])
    losses = np.concatenate([[reference[1]], at[:, 1]])  # the least loss of the front at a cost within [costs[i], costs[i + 1]]
    widths = np.minimum(costs[None, 1:], reference[0]) - np.maximum(costs[None, :-1], points[:, :1])
    heights = losses[None] - points[:, 1:]
    return (np.maximum(widths, 0) * np.maximum(heights, 0)).sum(1)


def compute_hypervolume(values: np.ndarray, reference: tuple[float, float]) -> float:
    """The area below `reference` that `values` (cost, loss) dominate."""
    at = values[_find_front(values)] if len(values) else np.zeros((0, 2))
    at = at[(at < reference).all(1)]
    return float((np.diff([*at[:, 0], reference[0]]) * (reference[1] - at[:, 1])).sum())


def _find_front(values: np.ndarray) -> np.ndarray:
    """Indices of the non-dominated rows, by ascending first column."""
    order = np.lexsort((values[:, 1], values[:, 0]))
    lower = np.minimum.accumulate(values[order, 1])
    return order[np.concatenate([[True], values[order[1:], 1] < lower[:-1]])]


def _list_trials(study: optuna.Study, state: optuna.trial.TrialState) -> list[FrozenTrial]:
    return study.get_trials(deepcopy=False, states=(state,))


def _is_ordered(d: BaseDistribution) -> bool:
    """True for numbers: shares, and choices of increasing numbers such as the removed branches or batches."""
    if not isinstance(d, optuna.distributions.CategoricalDistribution):
        return True
    numbers = [c for c in d.choices if isinstance(c, int | float) and not isinstance(c, bool)]
    return len(numbers) == len(d.choices) and numbers == sorted(numbers)


def _list_values(d: BaseDistribution) -> list[Any]:
    if isinstance(d, optuna.distributions.CategoricalDistribution):
        return list(d.choices)
    assert isinstance(d, optuna.distributions.FloatDistribution)
    assert d.step is not None
    return [round(d.low + i * d.step, 9) for i in range(round((d.high - d.low) / d.step) + 1)]
