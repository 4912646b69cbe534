"""Results of earlier whole-network measurements are read from the timing cache; damaged or forged rows do not change results."""

import dataclasses
import shutil
import sqlite3
import threading
import time

import numpy as np
import pytest
from nets import inputs, residual

from whet.backends import get_backend
from whet.builder import BuildConfig, Silent, build
from whet.builder.progress import ProgressLog
from whet.builder.select import whole_engine
from whet.builder.select.engine_candidate import BenchmarkHarness, EngineCandidate
from whet.builder.select.formats import Assignment
from whet.builder.select.search import Search
from whet.builder.verify.host_overlap import OverlappedWork
from whet.engine.report import EngineTime
from whet.measure.engine_history import EngineHistory
from whet.measure.timing_cache import Timed
from whet.ops import run_network
from whet.runtime import bind

QUICK = BuildConfig(avg_timing=1, whole_engines=3, verify=False)


@pytest.fixture(autouse=True)
def no_retiming(monkeypatch):
    """On a busy machine layers of short networks may be re-timed, which changes selections (tests/measure/test_layer_profile.py)."""
    monkeypatch.setattr(Search, "retime_contradictions", lambda *_: [])


@pytest.fixture
def cached(tmp_path, monkeypatch):
    """A config with a cache; times of such short networks vary by more than RECALL_DOUBT between builds."""
    monkeypatch.setattr(whole_engine, "RECALL_DOUBT", np.inf)
    return dataclasses.replace(QUICK, timing_cache=str(tmp_path / "t.sqlite"))


@pytest.fixture(scope="module")
def filled_cache(tmp_path_factory):
    """The path of a timing cache after a build of `residual()`."""
    path = tmp_path_factory.mktemp("filled") / "t.sqlite"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Search, "retime_contradictions", lambda *_: [])
        assert build(residual(), dataclasses.replace(QUICK, timing_cache=str(path))).probe == {}
    return path


@pytest.fixture
def timed(monkeypatch):
    """The whole engines timed, in order: a list of names per call."""
    calls, measure = [], BenchmarkHarness.measure

    def noting(harness, candidates):
        calls.append([e.what for e in candidates])
        measure(harness, candidates)

    monkeypatch.setattr(BenchmarkHarness, "measure", noting)
    return calls


def test_a_second_build_compares_no_engines(cached, timed, monkeypatch):
    first = build(residual(), cached)
    timed.clear()

    def never(*_):
        raise AssertionError("the timing cache has the selection of kernels in this network")

    monkeypatch.setattr(EngineHistory, "write_selection", never)
    again = build(residual(), cached)
    assert again.choices == first.choices
    assert [e.what for e in again.report.engines] == [e.what for e in first.report.engines]
    assert [len(c) for c in timed] == [1], "only the selected one, for the report"
    assert "earlier build" in again.report.choice.engines_timed
    assert not first.report.choice.engines_timed
    assert again.report.timing.misses == 0


def test_implausible_recalled_times_are_measured_again(timed, monkeypatch):
    """An engine recalled with a time of one nanosecond is slower now than the recalled times of the others: all are timed again, once."""
    monkeypatch.setattr(Assignment, "differs_from", lambda a, b: True)
    monkeypatch.setattr(EngineHistory, "read_times", lambda _, candidates: [Timed(1e-6 * (1 + (k > 0)), 0.0, 9) for k in range(len(candidates))])
    config = dataclasses.replace(QUICK, in_network=False)
    for doubt, calls in ((np.inf, 1), (1.05, 2)):
        timed.clear()
        monkeypatch.setattr(whole_engine, "RECALL_DOUBT", doubt)
        report = build(residual(), config).report
        assert [len(c) for c in timed] == [1, len(report.engines)][:calls]
        assert len(report.engines) > 1
        assert bool(report.choice.engines_timed) == (calls == 1)
        assert all(e.ms > 1e-5 for e in report.engines) == (calls == 2), "measured, not recalled"


def test_recalled_times_are_not_doubted_under_external_load():
    candidate = EngineCandidate("kept", *[None] * 6)
    best = whole_engine.SelectedEngine(candidate, [EngineTime("", 3.0, 0.0), EngineTime("", 2.0, 0.0), EngineTime("", 4.0, 0.0)], 1.0, recalled=True)
    assert best.is_doubtful
    assert not dataclasses.replace(best, recalled=False).is_doubtful
    assert not dataclasses.replace(best, engines=best.engines[:1]).is_doubtful
    assert not dataclasses.replace(best, engines=[EngineTime("", 2.05, 0.0), EngineTime("", 2.0, 0.0)]).is_doubtful
    candidate.disturbed = True
    assert not best.is_doubtful


def test_only_weights_may_differ(cached):
    def recalled(net):
        return bool(build(net, cached).report.choice.engines_timed)

    assert not recalled(residual(seed=0))
    assert recalled(residual(seed=1))
    for other in (residual(batch=3), residual(channels=32), residual(size=12)):
        assert not recalled(other)


def test_engines_with_other_edges_have_other_keys(cached, monkeypatch):
    def net(swapped):
        network = residual()
        add = next(x for x in network.layers if x.op == "Add")
        if swapped:
            add.inputs = (add.inputs[0], next(x for x in network.layers if "relu2" in x.sources).output)
        return network

    texts, digest_engine = [], EngineHistory.digest_engine

    def record(history, engine):
        texts.append(digest_engine(history, engine))
        return texts[-1]

    monkeypatch.setattr(EngineHistory, "digest_engine", record)
    for swapped in (False, True, False):
        build(net(swapped), dataclasses.replace(cached, whole_engines=1, passes=("none",)))
        texts.append("|")
    a, b, c = (set(part.split()) for part in " ".join(texts).split("|")[:3])
    assert a
    assert a == c
    assert not a & b


@pytest.mark.parametrize(
    "damage",
    [
        "UPDATE timings SET ms = 'fast'",
        "UPDATE timings SET ms = -1.0",
        "UPDATE timings SET about = 'no JSON', samples = 0, ms = ms * abs(random() % 1000)",
        "UPDATE timings SET ms = 9e999",
        "UPDATE timings SET ms = 0.0, spread_ms = 9e999",
        "UPDATE timings SET ms = 0.0 WHERE key < '8'",
        "DELETE FROM timings WHERE about LIKE '%the network with it%'",
        "DELETE FROM timings WHERE about LIKE '%whole engine%'",
    ],
)
def test_damaged_rows_change_no_result(cached, filled_cache, damage):
    net = residual()
    shutil.copy(filled_cache, cached.timing_cache)
    db = sqlite3.connect(cached.timing_cache)
    changed = db.execute(damage).rowcount
    db.commit()
    db.close()
    assert changed or "the network with it" in damage, "possibly no kernel was nearly as fast by itself"
    plan = build(net, dataclasses.replace(cached, verify=True))
    assert plan.report.verification.failures == []
    listed = {name: {(c.tactic, c.implementation) for c in rows} for name, rows in plan.report.candidates.items()}
    for name, choice in plan.choices.items():
        assert (choice.tactic, choice.implementation) in listed.get(name, {(choice.tactic, choice.implementation)})
    bound = bind(plan, get_backend("cpu"))
    feed = inputs(net)
    bound.feed(feed)
    bound.run()
    want = run_network(net, feed, widen=True)["y"]
    assert np.abs(bound.fetch()["y"] - want).max() <= 1e-5 * np.abs(want).max()


def test_disturbed_times_are_not_stored(cached, monkeypatch):
    measure = BenchmarkHarness.measure

    def disturbed(harness, candidates):
        measure(harness, candidates)
        for e in candidates:
            e.disturbed = True

    monkeypatch.setattr(BenchmarkHarness, "measure", disturbed)
    build(residual(), cached)
    db = sqlite3.connect(cached.timing_cache)
    (rows,) = db.execute("SELECT count(*) FROM timings WHERE about LIKE '%whole engine%'").fetchone()
    db.close()
    assert rows == 0


def test_phase_seconds_add_up_to_the_build_time(monkeypatch):
    """Both in CPU seconds of this process: external load between two readings of a clock does not count."""
    monkeypatch.setattr("whet.builder.progress.perf_counter", time.process_time)
    monkeypatch.setattr(time, "perf_counter", time.process_time)
    plan = build(residual(), dataclasses.replace(QUICK, timing_cache="", verify=True))
    spent = plan.report.phase_seconds
    assert list(spent)[:4] == ["start", "passes", "candidates", "timing"]
    assert {"fused or unfused", "choice", "whole engines", "choice in the network", "verification"} <= set(spent)
    assert sum(spent.values()) == pytest.approx(plan.report.build_seconds, rel=0.02)


def test_phases_of_several_engines_are_added_up():
    outer = ProgressLog(Silent())
    for _ in range(2):
        inner = ProgressLog(outer)
        inner.stage("passes", 1)
        inner.note("once")
        inner.seconds()
    assert "passes" in outer.seconds()
    assert outer.notes == ["once"]


@pytest.mark.parametrize("many", [False, True])
def test_results_of_host_threads_are_delivered_in_order(many):
    taken, threads = [], set()

    def make(i):
        threads.add(threading.current_thread())
        return i * i

    with OverlappedWork(many) as beside:
        late = beside.early(lambda: make(100))
        for i in range(40):
            beside.schedule(lambda i=i: make(i), taken.append)
        beside.settle()
        assert taken == [i * i for i in range(40)]
        assert late() == 10000
    assert (threading.current_thread() in threads) is not many


def test_an_error_on_a_host_thread_is_raised_on_delivery():
    with OverlappedWork(True) as beside:
        beside.schedule(lambda: 1 // 0, print)
        with pytest.raises(ZeroDivisionError):
            beside.settle()
