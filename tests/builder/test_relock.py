"""Locks of engines with searched precisions: partly INT8, floating point because INT8 is not faster, or 16 bits within a budget."""

import dataclasses
import json
import sys
from pathlib import Path

import pytest
from nets import Stages

sys.path.insert(0, str(Path(__file__).parents[1] / "precision"))
from test_calibration import samples, small_network

from whet.builder import BuildConfig, plan_digest, save_lock
from whet.builder.precision import precision_search
from whet.builder.precision.float16 import build_floats_within
from whet.builder.precision.int8 import Calibration, Int8, build_int8, prepare
from whet.engine import engine_digest
from whet.errors import LockError
from whet.precision import find_quantization_sites
from whet.precision.budget import Budget
from whet.precision.sensitivity import select_samples
from whet.tactics import is_quantized, load_tactics
from whet.tactics.cpu.onednn import _api as dnn

SHAPE = {"x": (1, 3, 12, 12)}
CONFIG = BuildConfig(
    timing_cache="", threads=1, avg_timing=1, optimization_level=1, whole_engines=1, profiles=((SHAPE, SHAPE, SHAPE),), precisions=("int8",)
)
VNNI = pytest.mark.skipif(not dnn.has_isa("avx512_core_vnni"), reason="this CPU has no VNNI: quantized layers are refused")
DATA = Calibration(samples=lambda: samples(4))
load_tactics("cpu")


def no_calibration():
    raise AssertionError("calibrated under a lock")


def again(path, progress=None, **options):
    config = dataclasses.replace(CONFIG, lock=str(path), **options)
    return build_int8(small_network(), config, Calibration(samples=no_calibration), progress=progress)


def keep(monkeypatch, wanted: str):
    """Makes the engine with this name prefix the kept one."""

    def preference(strategy, candidates, allowed):
        return [next(i for i, c in enumerate(candidates) if c.what.startswith(wanted))]

    monkeypatch.setattr(Int8, "rank_candidates", preference)


@VNNI
def test_a_partly_quantized_engine_is_locked(monkeypatch, tmp_path):
    net = small_network()
    names = [x.name for x in find_quantization_sites(prepare(net, CONFIG)).layers]
    monkeypatch.setattr(precision_search, "find_slow_layers", lambda before, after, layers: {names[0]})
    monkeypatch.setattr(Int8, "least_gain", float("-inf"))  # regardless of measured times
    keep(monkeypatch, "int8 without 1")
    plan = build_int8(net, CONFIG, DATA)
    convs = [x for x in plan.network.layers if "Conv" in (x.op, x.composite) or "Gemm" in (x.op, x.composite)]
    assert {is_quantized(x) for x in convs} == {True, False}
    save_lock(plan, tmp_path / "lock.json")
    assert json.loads((tmp_path / "lock.json").read_text())["quantized"]["float_layers"] == [names[0]]
    stages = Stages()
    made = again(tmp_path / "lock.json", stages)
    assert stages.names
    assert not stages.times
    assert plan_digest(made) == plan_digest(plan)
    assert engine_digest(made) == engine_digest(plan)
    save_lock(made, tmp_path / "second.json")
    assert (tmp_path / "second.json").read_text() == (tmp_path / "lock.json").read_text()


@VNNI
def test_an_engine_without_gain_from_int8_is_locked(monkeypatch, tmp_path):
    keep(monkeypatch, "floating point")
    plan = build_int8(small_network(), CONFIG, DATA)
    save_lock(plan, tmp_path / "lock.json")
    assert plan_digest(again(tmp_path / "lock.json")) == plan_digest(plan)


@VNNI
def test_differences_are_named(monkeypatch, tmp_path):
    keep(monkeypatch, "int8")
    save_lock(build_int8(small_network(), CONFIG, DATA), tmp_path / "lock.json")
    with pytest.raises(LockError, match=r"the option precisions: was \['int8'\], is \['bf16', 'int8'\]"):
        again(tmp_path / "lock.json", precisions=("bf16", "int8"))
    data = json.loads((tmp_path / "lock.json").read_text())
    name = next(iter(data["quantized"]["ranges"]))
    data["quantized"]["ranges"][name][1] *= 2
    (tmp_path / "other.json").write_text(json.dumps(data))
    with pytest.raises(LockError, match="the model"):
        again(tmp_path / "other.json")
    for wrong in ({}, [], {"ranges": [1], "scalings": {}, "corrections": {}, "float_layers": []}):
        data["quantized"] = wrong
        (tmp_path / "other.json").write_text(json.dumps(data))
        with pytest.raises(LockError, match="damaged"):
            again(tmp_path / "other.json")


def test_16_bit_engines_within_a_budget_are_locked(tmp_path):
    net, config = small_network(), dataclasses.replace(CONFIG, precisions=("bf16",))
    data = select_samples(samples(4), 4)
    plan, _ = build_floats_within(net, prepare(net, config), config, Budget.parse("snr:90"), data)
    save_lock(plan, tmp_path / "lock.json")
    locked = dataclasses.replace(config, lock=str(tmp_path / "lock.json"))
    made, _ = build_floats_within(small_network(), prepare(net, config), locked, Budget.parse("snr:90"), data)
    assert plan_digest(made) == plan_digest(plan)
