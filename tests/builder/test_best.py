"""--best: engines of mixed types are also tried without 16-bit floats if the sums of their times are close; the kept engine can be locked.
Builds of several engines report the current one.
"""

import dataclasses
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "precision"))
from test_calibration import small_network
from test_relock import CONFIG, DATA, VNNI, keep, no_calibration

from whet.backends import get_backend
from whet.builder import build, plan_digest, save_lock
from whet.builder.candidates.filter import stores_float16
from whet.builder.precision.float16 import find_small_type
from whet.builder.precision.int8 import Calibration, build_int8
from whet.builder.progress import Silent
from whet.builder.select import verified_search, whole_engine
from whet.builder.select.engine_candidate import BenchmarkHarness
from whet.builder.select.search import Search
from whet.tactics import is_quantized

BEST = dataclasses.replace(CONFIG, precisions=("best",), whole_engines=4)
BF16 = pytest.mark.skipif("avx512_bf16" not in get_backend("cpu").capabilities.features, reason="this CPU has no instructions for BF16")


@pytest.fixture
def narrow_seems_faster(monkeypatch):
    """By the sum of times 16-bit kernels win every layer that has one; as whole engines those without them win."""
    usable = Search.list_usable

    def cheaper(self, layer, net):
        options = usable(self, layer, net)
        for o in options:
            o.ms = 1.0 if stores_float16(o) else 2.0
        return options

    def measure(harness, candidates):
        for e in candidates:
            harness.bind(e)
            e.samples = [1.0 if e.what == whole_engine.WIDE else 2.0] * 3

    monkeypatch.setattr(Search, "list_usable", cheaper)
    monkeypatch.setattr(BenchmarkHarness, "measure", measure)
    monkeypatch.setattr(whole_engine, "SUM_MARGIN", 100.0)
    monkeypatch.setattr(Search, "cannot_win", lambda self, ms: False)


def engines(plan):
    return [e.what for e in plan.report.engines]


@VNNI
@BF16
@pytest.mark.parametrize("wanted", ["floating point", "int8"])
def test_the_kept_engine_has_no_16_bit_types_and_is_locked(wanted, narrow_seems_faster, monkeypatch, tmp_path):
    keep(monkeypatch, wanted)
    plan = build_int8(small_network(), BEST, DATA)
    assert engines(plan)[0] == whole_engine.WIDE
    assert find_small_type(plan) is None
    assert any(is_quantized(x) for x in plan.network.layers) == wanted.startswith("int8")
    save_lock(plan, tmp_path / "lock.json")
    made = build_int8(small_network(), dataclasses.replace(BEST, lock=str(tmp_path / "lock.json")), Calibration(samples=no_calibration))
    assert plan_digest(made) == plan_digest(plan)


@BF16
def test_only_close_sums_are_tried(narrow_seems_faster, monkeypatch):
    monkeypatch.setattr(whole_engine, "SUM_MARGIN", 0.5)
    plan = build_int8(small_network(), BEST, DATA)
    assert engines(plan) == ["least sum of times"]
    assert find_small_type(plan) in ("fp16", "bf16") or any(is_quantized(x) for x in plan.network.layers)


@VNNI
def test_without_permission_there_is_nothing_to_try():
    assert whole_engine.WIDE not in engines(build_int8(small_network(), dataclasses.replace(BEST, precisions=("int8",)), DATA))


@pytest.mark.parametrize(("rival", "tried_apart"), [(1e-6, False), (1e6, True), (None, True)])
def test_an_engine_that_cannot_win_is_tried_in_one_form(rival, tried_apart, monkeypatch):
    apart = []
    monkeypatch.setattr(verified_search, "time_unfused", apart.append)
    plan = build(small_network(), dataclasses.replace(BEST, optimization_level=3), incumbent_ms=rival)
    assert bool(apart) == tried_apart
    if rival == 1e-6:
        assert engines(plan) == ["least sum of times"]
    assert len(plan.report.layer_ms) == len(plan.network.layers), "layers are compared with those of the other engine"


@VNNI
def test_progress_names_the_engine_being_built():
    class Watch(Silent):
        def __init__(self):
            super().__init__()
            self.stages, self.steps = [], []

        def stage(self, name, total):
            self.stages.append(name)
            self.steps.append(0)

        def step(self, name, done=1):
            self.steps[-1] += done

    watch = Watch()
    plan = build_int8(small_network(), CONFIG, DATA, progress=watch)
    assert watch.stages[0] == "calibration"
    assert watch.steps[0] == 4  # samples
    for name in ("int8: timing", "floating point: timing", "floating point: whole engines", "comparing engines"):
        assert name in watch.stages
    assert {"calibration", "timing", "whole engines", "comparing engines"} <= set(plan.report.phase_seconds)
