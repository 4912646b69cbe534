"""Targets, the Pareto set and the final selection: by cases with obvious answers, and against the definition."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from whet.search.outcome.verdicts import Judging
from whet.search.recipe.fields import Amount
from whet.search.recipe.metrics import Score, call_user_metric, compute_wilson_interval, drop, top1
from whet.search.recipe.recipe import Target
from whet.search.recipe.targets import (
    Measured,
    are_met,
    check_target,
    choose_candidate,
    compute_distance,
    dominates,
    find_measured_pareto_set,
    find_pareto_set,
)


def row(ms=1.0, ratio=0.5, drop=0.0, mj=None, memory=100.0, size=100.0):
    return {
        "latency": {"median_ms": ms, "ratio": ratio}, "throughput": 1e3 / ms, "memory_bytes": memory, "engine_bytes": size,
        "energy": {"mj": mj, "net_mj": None if mj is None else mj / 4, "about": "not measurable: no meter"},
        "drop": {"value": drop}, "metric": {"value": 99.0},
    }  # fmt: skip


ORIGINAL = row(ms=2.0, ratio=1.0, mj=None, memory=200.0, size=400.0)


@pytest.mark.parametrize(("target", "miss"), [
    (Target(latency=Amount(0.5, True)), 0), (Target(latency=Amount(0.4, True)), 0.25),
    (Target(latency=Amount(1.0)), 0), (Target(latency=Amount(0.5)), 1),
    (Target(throughput=Amount(2, True)), 0), (Target(throughput=Amount(3, True)), 0.5), (Target(throughput=Amount(2000)), 1),
    (Target(memory=Amount(0.5, True)), 0), (Target(memory=Amount(50)), 1), (Target(engine_size=Amount(0.2, True)), 0.25),
])  # fmt: skip
def test_a_miss_is_the_relative_distance(target, miss):
    (only,) = check_target(target, row(), ORIGINAL)
    assert only.miss == pytest.approx(miss)
    assert are_met([only]) == (miss == 0)


def test_a_drop_is_counted_in_allowed_drops():
    target = Target(accuracy_drop=0.5)
    assert check_target(target, row(drop=0.5), ORIGINAL)[0].miss == 0
    assert check_target(target, row(drop=-3), ORIGINAL)[0].miss == 0
    assert check_target(target, row(drop=1.5), ORIGINAL)[0].miss == pytest.approx(2)
    assert check_target(Target(accuracy_drop=0.0), row(drop=0.99), ORIGINAL)[0].miss == pytest.approx(1)


def test_unmeasured_targets_are_not_met():
    found = check_target(Target(energy=Amount(5)), row(), ORIGINAL)
    assert not are_met(found)
    assert found[0].miss is None
    assert "not measurable" in found[0].text
    assert compute_distance(found) == 0
    assert are_met(check_target(Target(energy=Amount(5)), row(mj=4.0), ORIGINAL))
    assert not are_met(check_target(Target(net_energy=Amount(0.9)), row(mj=4.0), ORIGINAL))
    assert are_met(check_target(Target(net_energy=Amount(1)), row(mj=4.0), ORIGINAL))


@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), max_size=12))
def test_the_pareto_set_has_the_nondominated_points(points):
    front = {points[i] for i in find_pareto_set(points)}
    assert front == {p for p in points if not any(dominates(q, p) for q in points)}
    assert len(front) == len(find_pareto_set(points))


def measured(cost, loss, cost_error=0.0, loss_error=0.0):
    return Measured((cost, loss), (cost - cost_error, cost + cost_error), (loss - loss_error, loss + loss_error))


@pytest.mark.parametrize(
    ("a", "b", "dominated"),
    [
        ((1.0, 1.0), (2.0, 2.0), True),  # exact values
        ((1.0, 1.0, 0.1, 0.1), (2.0, 1.05, 0.1, 0.1), True),  # clearly faster, about as good
        ((1.0, 1.0, 0.1, 0.1), (1.05, 2.0, 0.1, 0.1), True),  # clearly better, about as fast
        ((1.0, 1.0, 0.1, 0.1), (1.05, 1.05, 0.1, 0.1), False),  # both intervals overlap: noise
        ((1.0, 1.05, 0.1, 0.1), (2.0, 1.0, 0.1, 0.1), False),  # slower, but more accurate by its value
    ],
)
def test_noise_dominates_no_point(a, b, dominated):
    first, second = measured(*a), measured(*b)
    assert first.clearly_dominates(second) is dominated
    assert not second.clearly_dominates(first)
    assert find_measured_pareto_set([second, first]) == ([1] if dominated else [1, 0])


def test_the_pareto_set_of_exact_points_is_the_usual_one():
    points = [(3.0, 1.0), (1.0, 3.0), (2.0, 2.0), (2.0, 2.0), (2.5, 2.5), (1.0, 4.0)]
    assert find_measured_pareto_set([measured(*p) for p in points]) == find_pareto_set(points)


@pytest.mark.parametrize("higher", [True, False])
def test_a_row_gives_its_intervals(higher):
    judging = Judging(SimpleNamespace(target=Target(), higher_is_better=higher), {"fp32-b1": ORIGINAL}, (1,))
    timed = {**row(ratio=0.5), "metric": {"value": 90.0, "low": 88.0, "high": 91.0}}
    timed["latency"]["ratio_interval"] = [0.45, 0.6]
    found = judging.measured(timed, 1)
    assert found.point == judging.point(timed, 1)
    assert found.cost == pytest.approx((0.9, 1.2))  # of 2 ms
    assert found.loss == ((-91.0, -88.0) if higher else (88.0, 91.0))
    old = judging.measured(row(ratio=0.5), 1)  # results of earlier versions have no interval
    assert old.cost == (old.point[0],) * 2
    assert old.loss == (old.point[1],) * 2


def test_the_selection():
    def candidate(cost, loss, ratio, lost):
        return cost, loss, check_target(Target(latency=Amount(0.5, True), accuracy_drop=1.0), row(ratio=ratio, drop=lost), ORIGINAL)

    slow, fast, right, wrong = candidate(10, 0, 1.0, 0), candidate(3, 0.9, 0.3, 0.9), candidate(4, 0.1, 0.4, 0.1), candidate(1, 9, 0.1, 9)
    assert choose_candidate([slow, fast, right, wrong], "latency") == 1
    assert choose_candidate([slow, fast, right, wrong], "accuracy") == 2
    assert choose_candidate([slow, wrong], "latency") == 0  # twice the requested latency is nearer than nine times the allowed drop
    assert choose_candidate([candidate(6, 0, 0.6, 0), wrong], "accuracy") == 0


def test_wilson_s_interval_is_the_published_one():
    low, high = compute_wilson_interval(81, 263)  # Newcombe 1998, table I, method 3
    assert (round(low, 4), round(high, 4)) == (0.2553, 0.3662)
    assert compute_wilson_interval(0, 20)[0] == pytest.approx(0, abs=1e-12)
    assert round(compute_wilson_interval(0, 20)[1], 4) == 0.1611
    assert compute_wilson_interval(20, 20)[1] == 1


def test_top1_and_its_drop_sample_by_sample():
    from whet.search.recipe.data import Labelled

    data = Labelled({"x": np.zeros((4, 2), np.float32)}, np.array([0, 1, 1, 0]))
    scores = np.array([[1, 0], [0, 1], [1, 0], [1, 0]], np.float32)
    score = top1(lambda feeds: {"y": scores, "other": np.zeros(3)}, data)
    assert score.value == 75
    assert score.samples == 4
    better = Score(100.0, each=np.full(4, 100.0))
    found = drop(better, score)
    assert found["value"] == 25
    assert found["low"] < 25 < found["high"]
    assert drop(better, score, higher_is_better=False)["value"] == -25
    assert drop(score, score) == {"value": 0, "low": 0, "high": 0}
    assert drop(Score(3.0), Score(2.0)) == {"value": 1, "low": None, "high": None}


def test_metric_functions():
    from whet.errors import UsageError

    predict = lambda feeds: {}  # noqa: E731
    assert call_user_metric(lambda p: 0.5, predict, "m") == Score(0.5)
    each = call_user_metric(lambda p: [1, 0, 1, 1], predict, "m")
    assert (each.value, each.samples) == (0.75, 4)
    assert each.low < 0.75 < each.high
    for wrong in (float("nan"), "good", [[1]], []):
        with pytest.raises(UsageError, match="m must return a finite number"):
            call_user_metric(lambda p, wrong=wrong: wrong, predict, "m")
