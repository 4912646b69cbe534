"""Verdicts of the CPU benchmarks, and the peers' options."""

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from whet import zoo

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def runners(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import _cpu_runners

    return _cpu_runners


@pytest.mark.parametrize(
    ("interval", "peers", "expected"),
    [
        ((1.1, 1.0, 1.2), 0.1, "met"),
        ((1.1, 0.99, 1.2), 0.1, "undecided"),
        ((0.9, 0.8, 1.0), 0.1, "undecided"),
        ((0.9, 0.8, 0.99), 0.1, "lost"),
        ((1.1, 1.05, 1.2), 0.3, "disturbed"),
    ],
)
def test_only_a_whole_interval_meets_or_loses_a_bar(runners, interval, peers, expected):
    assert runners.verdict(interval, 1.0, peers) == expected


def test_a_mean_over_rows_has_the_interval_over_processes(runners):
    rows = [[1.0, 1.0, 1.0, 1.0, 1.0, 4.0], [4.0, 4.0, 4.0, 4.0, 4.0, 4.0]]
    assert runners.mean_interval(rows) == pytest.approx((2.0, 2.0, 4.0))


@pytest.mark.parametrize("script", ["cpu_peers.py", "cpu_int8.py", "cpu_best.py"])
def test_both_orders_of_loading_are_equally_frequent(script):
    done = subprocess.run([sys.executable, str(BENCHMARKS / script), "--processes", "7"], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "give an even number" in done.stderr


def test_onnx_runtime_gets_its_fastest_options(runners, monkeypatch, tmp_path):
    pytest.importorskip("onnxruntime")
    model = tmp_path / "m.onnx"
    zoo.save("lenet5", model)
    x = {"input": np.ones((1, 1, 32, 32), np.float32)}
    slow = runners.ort_runner(model, 1, runners.OrtOptions("basic", spinning=False, arena=False))(x)
    np.testing.assert_allclose(*(next(iter(r.values())) for r in (slow, runners.ort_runner(model, 1)(x))), rtol=1e-5, atol=1e-6)
    tried, now = [], [0.0]
    monkeypatch.setattr(runners, "time", SimpleNamespace(perf_counter=lambda: now[0]))

    def runner(model, threads, options=runners.OrtOptions()):  # noqa: B008
        def run(arrays):
            tried.append(options)
            now[0] += 0.004 * (1 + (options.level != "extended") + options.arena)

        return run

    monkeypatch.setattr(runners, "ort_runner", runner)
    chosen = runners.tune_ort(model, 1, x)
    assert (chosen.level, chosen.arena) == ("extended", False)
    assert {o.level for o in tried} == {"all", "extended", "basic"}
    assert {o.spinning for o in tried} == {o.arena for o in tried} == {True, False}
