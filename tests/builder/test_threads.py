"""The number of threads: measured on request, named in the report, fixed by a lock."""

import dataclasses
import itertools
from types import SimpleNamespace

import numpy as np
import pytest
from nets import inputs, residual

from whet.backends import get_backend
from whet.builder import BuildConfig, build, plan_digest, save_lock
from whet.builder.config import AUTO_THREADS
from whet.builder.select import thread_count
from whet.builder.select.thread_count import list_thread_counts
from whet.ops import run_network
from whet.runtime import bind

QUICK = BuildConfig(timing_cache="", avg_timing=1, whole_engines=1, verify=False)
USABLE = get_backend("cpu").threads


@pytest.fixture(autouse=True)
def _all_threads_afterwards():
    yield
    get_backend("cpu")


def test_counts_are_measured_on_request_and_at_high_levels():
    def counts(**options):
        return list_thread_counts(dataclasses.replace(QUICK, **options))

    assert counts() == [0]
    assert counts(threads=3, optimization_level=5) == [3]
    assert counts(threads=AUTO_THREADS)[0] == USABLE
    assert counts(optimization_level=4)[-1] == 1
    assert counts(backend="null", optimization_level=5) == [0]
    assert list_thread_counts(dataclasses.replace(QUICK, threads=AUTO_THREADS), locked=1) == [1]


@pytest.mark.skipif(USABLE < 2, reason="one CPU: there is no choice")
@pytest.mark.parametrize(("many", "one", "expected"), [(1e-4, 1e-4, 1), (1.02e-4, 1e-4, 1), (0.5e-4, 1e-4, USABLE)])
def test_of_counts_that_do_not_differ_the_smallest_is_kept(monkeypatch, many, one, expected):
    """Runs on several threads scatter by multiples: a large spread does not keep the larger count."""

    def scatter(runs, *args, **options):
        count = len(runs)
        k = itertools.count()
        times = [lambda: many * (6 if next(k) % 5 in (2, 4) else 1), *[lambda: one] * (count - 1)]
        return compare(times, *args, **options)

    compare = thread_count.compare
    monkeypatch.setattr(thread_count, "compare", scatter)
    assert build(residual(), dataclasses.replace(QUICK, threads=AUTO_THREADS)).threads == expected


def test_a_thread_count_is_timed_after_a_pause(monkeypatch):
    calls = []
    monkeypatch.setattr(thread_count.time, "sleep", lambda s: calls.append("pause"))

    def time_runs(repeats):
        calls.append(repeats)
        return [seconds] * repeats

    for seconds, expected in ((1e-4, ["pause", 1, 4]), (0.1, ["pause", 1])):
        calls.clear()
        assert thread_count.measure_after_pause(SimpleNamespace(seconds=time_runs)) == seconds
        assert calls == expected


@pytest.mark.skipif(USABLE < 2, reason="one CPU: there is no choice")
def test_the_faster_count_is_kept_and_locked(tmp_path, monkeypatch):
    config = dataclasses.replace(QUICK, threads=AUTO_THREADS)

    def slow_first(runs, *args, **options):
        """The first engine (all threads) appears nine times slower."""
        return compare([lambda: 9 * runs[0](), *runs[1:]], *args, **options)

    compare = thread_count.compare
    monkeypatch.setattr(thread_count, "compare", slow_first)
    plan = build(residual(), config)
    assert plan.threads < USABLE
    assert [r.threads for r in plan.report.threads] == list(dict.fromkeys((USABLE, max(USABLE // 2, 1), 1)))
    said = [(kind, n) for kind in ("notes", "info") for n in getattr(plan.report, kind) if "threads were chosen by time" in n]
    assert [(kind, "may be off" in n) for kind, n in said] in ([("info", False)], [("notes", True)]), "a warning on a busy machine only"
    save_lock(plan, tmp_path / "lock.json")
    again = build(residual(), dataclasses.replace(config, lock=str(tmp_path / "lock.json")))
    assert plan_digest(again) == plan_digest(plan)
    feed = inputs(residual())
    bound = bind(again, get_backend("cpu", threads=again.threads))
    bound.feed(feed)
    bound.run()
    want = run_network(residual(), feed, widen=True)["y"]
    assert np.abs(bound.fetch()["y"] - want).max() <= 1e-5 * np.abs(want).max()
