"""Results of earlier whole-network measurements are read from the timing cache; damaged or forged rows do not change results."""

import contextlib
import dataclasses
import shutil
import sqlite3
import threading
import time

import numpy as np
import pytest
from nets import inputs, residual

from whet.backends import Load, get_backend
from whet.builder import BuildConfig, Silent, build
from whet.builder.progress import ProgressLog
from whet.builder.select import whole_engine
from whet.builder.select.engine_candidate import BenchmarkHarness, EngineCandidate
from whet.builder.select.formats import Assignment
from whet.builder.select.search import Search
from whet.builder.verify.host_overlap import OverlappedWork
from whet.measure.engine_history import EngineHistory
from whet.ops import run_network
from whet.runtime import bind

QUICK = BuildConfig(avg_timing=1, whole_engines=3, verify=False)


@pytest.fixture(autouse=True)
def no_retiming(monkeypatch):
    """On a busy machine layers of short networks may be re-timed, which changes selections (tests/measure/test_layer_profile.py)."""
    monkeypatch.setattr(Search, "retime_contradictions", lambda *_: [])


@pytest.fixture
def cached(tmp_path, monkeypatch):
    """A config with a cache. Comparisons count as undisturbed on a busy machine too."""
    monkeypatch.setattr(EngineCandidate, "disturbed", property(lambda e: False, lambda e, value: None), raising=False)
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


def change(path, statement, *values):
    """Runs a statement on a timing cache; returns the number of changed rows."""
    db = sqlite3.connect(path)
    changed = db.execute(statement, values).rowcount
    db.commit()
    db.close()
    return changed


def test_a_second_build_compares_no_engines(cached, timed, monkeypatch):
    first = build(residual(), cached)
    timed.clear()

    def never(*_):
        raise AssertionError("the timing cache has the selection of kernels in this network")

    monkeypatch.setattr(EngineHistory, "write_selection", never)
    again = build(residual(), cached)
    assert again.choices == first.choices
    assert [e.what for e in again.report.engines] == [e.what for e in first.report.engines]
    assert timed == []
    assert (again.report.latency_ms, again.report.layer_ms) == (first.report.latency_ms, first.report.layer_ms)
    assert "earlier build" in again.report.choice.engines_timed
    assert not first.report.choice.engines_timed
    assert again.report.timing.misses == 0


@pytest.fixture
def several(monkeypatch):
    """Variants of equal assignment are candidates too, so that there are always several."""
    monkeypatch.setattr(Assignment, "differs_from", lambda a, b: True)


def test_a_recorded_selection_is_kept_whatever_the_times(cached, timed, several):
    """Engines of nearly equal speed: the recalled noise differs from that of the samples, and another engine could be selected."""
    config = dataclasses.replace(cached, in_network=False)
    first = build(residual(), config).report
    timed.clear()
    change(cached.timing_cache, "UPDATE timings SET ms = 1e-6 WHERE about LIKE '%whole engine%' AND about NOT LIKE ?", f"%: {first.choice.kept}\"%")
    again = build(residual(), config).report
    assert len(again.engines) > 1
    assert again.choice.kept == first.choice.kept
    assert min(e.ms for e in again.engines) == 1e-6
    assert timed == []


def test_retime_times_everything_and_replaces_the_recorded_selection(cached, timed, several):
    config = dataclasses.replace(cached, in_network=False)
    build(residual(), config)
    assert build(residual(), config).report.timing.misses == 0
    timed.clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(whole_engine, "select_earliest", lambda candidates: candidates[-1])
        report = build(residual(), dataclasses.replace(config, retime=True)).report
    assert report.timing.misses > 0
    assert [len(c) for c in timed] == [len(report.engines)]
    assert len(report.engines) > 1
    assert not report.choice.engines_timed
    assert build(residual(), config).report.choice.kept == report.choice.kept


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
        "DELETE FROM timings WHERE about LIKE '%selected engine%'",
        "DELETE FROM timings WHERE about LIKE '%layer of a whole engine%'",
    ],
)
def test_damaged_rows_change_no_result(cached, filled_cache, damage):
    net = residual()
    shutil.copy(filled_cache, cached.timing_cache)
    changed = change(cached.timing_cache, damage)
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


def test_times_under_load_are_used_only_under_load(timed, tmp_path, monkeypatch):
    config = dataclasses.replace(QUICK, timing_cache=str(tmp_path / "t.sqlite"), in_network=False)
    measure, load = BenchmarkHarness.measure, [True]

    def measure_under_load(harness, candidates):
        measure(harness, candidates)
        for e in candidates:
            e.disturbed = load[0]

    monkeypatch.setattr(BenchmarkHarness, "measure", measure_under_load)
    monkeypatch.setattr(whole_engine, "sample_load", lambda backend: load[0])

    def count_comparisons():
        timed.clear()
        report = build(residual(), config).report
        return len(timed), report.choice.engines_timed

    assert count_comparisons() == (1, "")
    assert count_comparisons() == (0, "by an earlier build under external load (timing cache)")
    load[0] = False
    assert count_comparisons() == (1, ""), "an idle machine gives better times"
    assert count_comparisons() == (0, "by an earlier build (timing cache)")
    load[0] = True
    assert count_comparisons() == (0, "by an earlier build (timing cache)")


def test_external_load_is_sampled():
    class Loaded:
        def __init__(self, others):
            self.others = others

        @contextlib.contextmanager
        def watch(self):
            yield (load := Load())
            load.others, load.seconds = self.others, 0.2

    assert [whole_engine.sample_load(Loaded(others)) for others in (None, 0.1, 1.0)] == [False, False, True]


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
