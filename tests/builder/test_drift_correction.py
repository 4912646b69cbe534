"""Selection of whole engines while the machine's speed changes, between rounds and between comparisons."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest

from whet.backends import get_backend
from whet.builder.select import whole_engine
from whet.builder.select.engine_candidate import EngineCandidate, select_earliest
from whet.engine import BuildReport
from whet.measure.timing_cache import Timed

SLOWDOWNS = [1.0, 2.0] * 15  # of the machine, per round


def candidate(name, samples=(), recalled_time=None):
    plan = SimpleNamespace(report=BuildReport())
    made = EngineCandidate(name, SimpleNamespace(cost=1.0), None, [], None, {}, plan)
    made.samples, made.recalled_time = list(samples), recalled_time
    return made


def test_paired_samples_reveal_a_difference_under_drift():
    """Both vary by half of their time and differ by 7 % in every round: the faster one is selected, although the quartiles overlap."""
    slow, fast = candidate("slow", [1.07 * s for s in SLOWDOWNS]), candidate("fast", SLOWDOWNS)
    assert slow.spread > 0.07 * fast.ms
    assert select_earliest([slow, fast]) is fast


def test_differences_within_the_noise_are_ties():
    dice = random.Random(4)
    a, b = (candidate(n, [1.0 + 0.1 * dice.random() for _ in range(30)]) for n in "ab")
    assert select_earliest([a, b]) is a
    assert select_earliest([b, a]) is b


def test_unpaired_candidates_are_compared_by_their_spread():
    left = candidate("left", [1.02, 1.03, 1.02])
    assert left.noise(candidate("stayed", [1.0, 1.1] * 15)) == pytest.approx(0.05)
    assert candidate("told", recalled_time=Timed(1.0, 0.25, 9)).noise(candidate("told", recalled_time=Timed(2.0, 0.0, 9))) == 0.25


@pytest.mark.parametrize("drift", [1.0, 2.0])
def test_candidates_that_are_not_retimed_are_scaled_by_the_drift_factor(drift, monkeypatch):
    """b wins the first comparison and is re-timed with the refined engine, when the machine may run at half speed; c, 10 % slower than b and not
    re-timed, must not overtake b because of that.
    """
    a, b, c = candidate("a"), candidate("b"), candidate("c")
    refined = candidate("b changed")
    first, second = {"a": 1.02, "b": 1.0, "c": 1.1}, {"a": 1.02, "b": 1.0, "b changed": 1.05}
    comparisons = []

    def measure(candidates):
        for e in candidates:
            e.samples, e.drift = [(first if not comparisons else {n: drift * ms for n, ms in second.items()})[e.what]] * 5, 1.0
        comparisons.append([e.what for e in candidates])

    monkeypatch.setattr(whole_engine, "refine_in_network", lambda *_: refined)
    monkeypatch.setattr(whole_engine, "profile_layers", lambda *_: {})
    log = SimpleNamespace(stage=lambda name, total: None, phase=lambda name: None, step=lambda name: None)
    config = SimpleNamespace(optimization_level=3, in_network=True)
    harness = SimpleNamespace(measure=measure, bind=lambda e: SimpleNamespace(run_timed=None))
    history = SimpleNamespace(**dict.fromkeys(("read_times", "write_times", "write_selected", "write_layer_times"), lambda *_, **__: None))
    for e in (a, b, c, refined):
        e.net = SimpleNamespace(layers=[])
    search = SimpleNamespace(config=config, cannot_win=lambda ms: False, log=log, history=history, backend=get_backend("null"))
    best = whole_engine.time_and_select(search, None, harness, [a, b, c])
    assert comparisons == [["a", "b", "c"], ["a", "b", "b changed"]]
    assert best.candidate.what == "b"
    assert {e.what: e.ms for e in best.engines} == pytest.approx({"a": 1.02 * drift, "b": drift, "b changed": 1.05 * drift, "c": 1.1 * drift})
