"""Which whole engine is kept where the machine changes its pace between turns and between races."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest

from whet.backends import get_backend
from whet.builder.select import whole_engine
from whet.builder.select.engine_candidate import EngineCandidate
from whet.engine import BuildReport
from whet.measure.timing_cache import Timed

PACES = [1.0, 2.0] * 15  # of the machine, turn by turn


def candidate(what, samples=(), recalled_time=None):
    plan = SimpleNamespace(report=BuildReport())
    found = EngineCandidate(what, SimpleNamespace(cost=1.0), None, [], None, {}, plan)
    found.samples, found.recalled_time = list(samples), recalled_time
    return found


def test_a_pace_that_changes_hides_no_difference():
    """Both vary by half of their time and differ by 7 % in every single turn: the second is kept. By their quartiles they were equal."""
    slow, fast = candidate("slow", [1.07 * p for p in PACES]), candidate("fast", PACES)
    assert slow.spread > 0.07 * fast.ms
    assert whole_engine._select_earliest([slow, fast]) is fast


def test_what_differs_by_noise_alone_is_equal():
    dice = random.Random(4)
    a, b = (candidate(n, [1.0 + 0.1 * dice.random() for _ in range(30)]) for n in "ab")
    assert whole_engine._select_earliest([a, b]) is a
    assert whole_engine._select_earliest([b, a]) is b


def test_those_of_other_turns_are_judged_by_their_spread():
    left = candidate("left", [1.02, 1.03, 1.02])
    assert left.noise(candidate("stayed", [1.0, 1.1] * 15)) == pytest.approx(0.05)
    assert candidate("told", recalled_time=Timed(1.0, 0.25, 9)).noise(candidate("told", recalled_time=Timed(2.0, 0.0, 9))) == 0.25


@pytest.mark.parametrize("now", [1.0, 2.0])
def test_who_is_not_timed_again_is_compared_as_it_would_be_now(now, monkeypatch):
    """b wins the first race and runs again beside one with other kernels, when the machine may be half as fast; c, which took a tenth more than b
    and stayed out, was not made faster by that."""
    a, b, c = candidate("a"), candidate("b"), candidate("c")
    refined = candidate("b changed")
    first, second = {"a": 1.02, "b": 1.0, "c": 1.1}, {"a": 1.02, "b": 1.0, "b changed": 1.05}
    races = []

    def timed(search, candidates, harness, remeasure):
        for e in candidates:
            e.samples, e.drift = [(first if not races else {n: now * ms for n, ms in second.items()})[e.what]] * 5, 1.0
        races.append([e.what for e in candidates])

    monkeypatch.setattr(whole_engine, "_set_times", timed)
    monkeypatch.setattr(whole_engine, "refine_in_network", lambda *_: refined)
    monkeypatch.setattr(whole_engine, "profile_layers", lambda *_: {})
    log = SimpleNamespace(phase=lambda name: None, step=lambda what: None)
    config = SimpleNamespace(optimization_level=3, in_network=True)
    harness = SimpleNamespace(bind=lambda e: SimpleNamespace(run_timed=None))
    for e in (a, b, c, refined):
        e.net = SimpleNamespace(layers=[])
    search = SimpleNamespace(config=config, cannot_win=lambda ms: False, log=log, backend=get_backend("null"))
    best = whole_engine._compare_engines(search, None, harness, [a, b, c])
    assert races == [["a", "b", "c"], ["a", "b", "b changed"]]
    assert best.candidate.what == "b"
    assert {e.what: e.ms for e in best.engines} == pytest.approx({"a": 1.02 * now, "b": now, "b changed": 1.05 * now, "c": 1.1 * now})
