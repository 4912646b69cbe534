"""The sampler that models the trials: its hypervolume, its model, and what it draws."""

from __future__ import annotations

import numpy as np
import optuna
import pytest

from whet.search.study.study import make_sampler
from whet.search.study.surrogate import Encoding, Reference, compute_hypervolume, compute_improvements, predict

DIMENSIONS = 5


def value(params):
    """(cost, metric): cost falls with each share, the loss of accuracy has a cliff at another place in each dimension."""
    x = np.array([params[f"d{i}"] for i in range(DIMENSIONS)])
    loss = float((np.array([1, 0.1, 3, 0.3, 1]) * np.expm1(5 * x) / 20).sum())
    return float(1 - x.mean()), 90 - loss


def searched(name, seed, trials=24, running=0):
    """The drawn points and their values; `running` trials are requested before their results are known."""
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    study = optuna.create_study(directions=["minimize", "maximize"], sampler=make_sampler(optuna, name, seed, 8, -1, Reference(1.0, -80.0, 2.0)))
    waiting, drawn = [], []
    for _ in range(trials):
        trial = study.ask()
        params = {f"d{i}": trial.suggest_float(f"d{i}", 0, 0.8, step=0.1) for i in range(DIMENSIONS)}
        params["kind"] = trial.suggest_categorical("kind", ["a", "b"])
        drawn.append(params)
        waiting.append((trial, value(params)))
        while len(waiting) > running:
            study.tell(*waiting.pop(0))
    return drawn, np.array([(c, -m) for c, m in map(value, drawn)])


def test_the_added_area_is_the_difference_of_hypervolumes():
    rng = np.random.default_rng(0)
    values, points = rng.random((30, 2)), rng.random((40, 2)) * 1.2
    before = compute_hypervolume(values, (1.0, 1.0))
    np.testing.assert_allclose(
        compute_improvements(points, values, (1.0, 1.0)),
        [compute_hypervolume(np.vstack([values, p]), (1.0, 1.0)) - before for p in points],
        atol=1e-12,
    )
    assert compute_hypervolume(np.array([[0.5, 0.5]]), (1.0, 1.0)) == 0.25
    assert compute_hypervolume(np.array([[0.5, 1.5]]), (1.0, 1.0)) == 0


def test_the_model_fits_and_knows_where_it_is_unsure():
    rng = np.random.default_rng(0)
    x = rng.random((40, 3))

    def f(a):
        return 2 * a[:, 0] - a[:, 1] + np.sin(3 * a[:, 2])

    mean, deviation = predict(x, f(x), x[:5])
    np.testing.assert_allclose(mean, f(x[:5]), atol=0.05)
    inside = rng.random((50, 3))
    assert np.abs(predict(x, f(x), inside)[0] - f(inside)).max() < 0.2
    assert predict(x, f(x), np.full((1, 3), 3.0))[1] > 5 * deviation.max()


def test_coordinates_that_hardly_matter_do_not_blur_the_model():
    rng = np.random.default_rng(0)
    x, asked = rng.random((40, 6)), rng.random((200, 6))
    mean, _ = predict(x, np.sin(6 * x[:, 2]), asked)
    assert np.abs(mean - np.sin(6 * asked[:, 2])).max() < 0.1  # 1.5 with one length scale for all


def test_choices_of_increasing_numbers_are_ordered():
    choice = optuna.distributions.CategoricalDistribution
    space = Encoding({"depth": choice([0, 1, 2, 8]), "fusion": choice(["all", "-fuse_silu"]), "two_four": choice([False, True])})
    assert list(space.ordered) == [True, False, False]
    np.testing.assert_allclose(space.encode(np.array([[1, 0, 1]])), [[1 / 3, 2**-0.5, 0, 0, 2**-0.5]])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*constraints_func:FutureWarning", "ignore:.*multivariate:optuna.exceptions.ExperimentalWarning")
def test_it_reaches_more_than_random_points_and_tpe():
    """Five searches of 24 trials each: the model's worst is above the others' mean."""
    reached = {n: [compute_hypervolume(searched(n, seed)[1], (1.0, -80.0)) for seed in range(5)] for n in ("gp", "tpe", "random")}
    assert min(reached["gp"]) > max(np.mean(reached["tpe"]), np.mean(reached["random"])), reached


@pytest.mark.parametrize("running", [0, 3])
def test_it_draws_no_point_twice(running):
    drawn = searched("gp", 0, 24, running)[0]
    assert len({tuple(p.values()) for p in drawn}) == 24
    assert {p["kind"] for p in drawn} == {"a", "b"}


def test_without_a_target_for_the_accuracy_it_searches_too():
    study = optuna.create_study(directions=["minimize", "minimize"], sampler=make_sampler(optuna, "gp", 0, 4, 1, None))
    for _ in range(10):
        trial = study.ask()
        cost, metric = value({f"d{i}": trial.suggest_float(f"d{i}", 0, 0.8, step=0.1) for i in range(DIMENSIONS)})
        study.tell(trial, [cost, 90 - metric])
    assert len({tuple(t.params.values()) for t in study.trials}) == 10
