"""Comparisons of built engines by the timing cache: thread counts and sample modes are selected again without timing."""

import dataclasses

import numpy as np
import pytest
from nets import residual
from test_sample_modes import config as sample_config
from test_sample_modes import feed, inception

from whet.backends import get_backend
from whet.builder import BuildConfig, build, plan_digest
from whet.builder.batching import per_sample
from whet.builder.config import AUTO_THREADS
from whet.builder.select import plan_history, thread_count
from whet.builder.verify import repeated
from whet.measure.compare import Ranking
from whet.measure.policy import THREAD_COUNTS
from whet.ops import run_network
from whet.runtime import Runtime

pytestmark = pytest.mark.skipif(get_backend("cpu").threads < 2, reason="one CPU: there is no choice")


@pytest.fixture(autouse=True)
def _all_threads_afterwards():
    yield
    get_backend("cpu")


def give_times(monkeypatch, module, *ms):
    """Every comparison in `module` gives the engines these times; returns the list of comparisons made."""
    made = []

    def compare(runs, policy, **options):
        made.append(len(runs))
        times = [[ms[i] / 1e3] * 8 for i in range(len(runs))]
        return Ranking(policy, times, times, list(range(len(runs))))

    monkeypatch.setattr(module, "compare", compare)
    return made


def test_the_thread_count_of_an_earlier_build_is_selected_again(tmp_path, monkeypatch):
    config = BuildConfig(threads=AUTO_THREADS, timing_cache=str(tmp_path / "t.sqlite"), avg_timing=1, whole_engines=1, max_tactics=1, verify=False)
    give_times(monkeypatch, thread_count, 3.0, 1.0, 2.0)
    first = build(residual(), config)
    made = give_times(monkeypatch, thread_count, 1.0, 9.0, 9.0)
    again = build(residual(), config)
    assert not made
    assert plan_digest(again) == plan_digest(first)
    assert again.threads == 1
    assert again.report.threads == first.report.threads
    assert any("threads were chosen by time" in text and "by an earlier build" in text for text in again.report.info)
    retimed = build(residual(), dataclasses.replace(config, retime=True))
    assert made
    assert retimed.threads == get_backend("cpu").threads
    assert build(residual(), config).threads == get_backend("cpu").threads  # the new comparison replaces the earlier one


def test_engines_that_differ_are_compared(tmp_path, monkeypatch):
    made = give_times(monkeypatch, thread_count, 3.0, 1.0, 2.0)
    config = BuildConfig(threads=AUTO_THREADS, timing_cache=str(tmp_path / "t.sqlite"), avg_timing=1, whole_engines=1, max_tactics=1, verify=False)
    build(residual(), config)
    build(inception(), dataclasses.replace(config, profiles=sample_config().profiles, samples="together"))
    assert len(made) == 2


def test_times_under_external_load_are_used_under_load_alone(tmp_path, monkeypatch):
    class Disturbed(Ranking):
        disturbed = True

    busy = [True]
    monkeypatch.setattr(plan_history, "sample_load", lambda backend: busy[0])
    plans = [build(residual(), BuildConfig(threads=n, timing_cache="", verify=False, optimization_level=0)) for n in (2, 1)]
    config, backend = BuildConfig(timing_cache=str(tmp_path / "t.sqlite")), get_backend("cpu")
    times = [[0.2] * 8, [0.1] * 8]
    first = plan_history.compare_plans(plans, (0, 1), "a test", config, backend, lambda: Disturbed(THREAD_COUNTS, times, times, [0, 1]))
    assert (first.selected, first.recalled) == (1, False)
    assert plan_history.recall_plans(plans, "a test", config, backend).selected == 1
    assert plan_history.recall_plans(plans, "another test", config, backend) is None
    assert plan_history.recall_plans(plans[::-1], "a test", config, backend) is None
    busy[0] = False
    assert plan_history.recall_plans(plans, "a test", config, backend) is None


@pytest.mark.parametrize(("ms", "expected"), [((3.0, 1.0, 2.0), "parallel"), ((3.0, 2.0, 1.0), "sequential"), ((1.0, 2.0, 3.0), "together")])
def test_the_sample_mode_of_an_earlier_build_is_selected_again(tmp_path, monkeypatch, ms, expected):
    pytest.importorskip("llvmlite")
    monkeypatch.setenv("WHET_VERIFIED", str(tmp_path / "verified"))
    config = sample_config(samples="auto", timing_cache=str(tmp_path / "t.sqlite"), optimization_level=3, max_tactics=1, whole_engines=1)
    give_times(monkeypatch, per_sample, *ms)
    first = build(inception(), config)
    assert first.report.samples.kept == expected
    made = give_times(monkeypatch, per_sample, *ms[::-1])
    monkeypatch.setattr(repeated, "verify_engine", lambda *a: pytest.fail("the engine has been verified before"))
    again = build(inception(), config)
    assert not made
    assert plan_digest(again) == plan_digest(first)
    for name, value in dataclasses.asdict(first.report.samples).items():
        got = getattr(again.report.samples, name)
        assert got == pytest.approx(value) if isinstance(value, float) else name == "why" or got == value
    context = Runtime().load(again).create_context()
    for batch in (1, 4, 7):
        got, want = context.run(feed(batch)), run_network(inception(), feed(batch))
        assert all(np.allclose(got[n], want[n], rtol=1e-4, atol=1e-5) for n in want)
