"""--best: beside engines of mixed types the same with FP32 alone are tried as whole engines, and what is kept can be locked."""

import dataclasses
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "precision"))
from test_calibration import small_network
from test_relock import CONFIG, DATA, VNNI, keep, no_calibration

from whet.backends import get_backend
from whet.builder import plan_digest, quantized, save_lock
from whet.builder.floats import small_type
from whet.builder.quantized import Calibration, build_int8
from whet.tactics import is_quantized

BEST = dataclasses.replace(CONFIG, precisions=("best",))
WIDE_FLOATS, WIDE_REST = "floating point, FP32 alone", ", the rest in FP32"


def tried(plan):
    return [c["what"] for c in plan.report["precision_choice"]]


@VNNI
def test_engines_that_use_sixteen_bits_are_tried_without(monkeypatch):
    monkeypatch.setattr(quantized, "small_type", lambda plan: "bf16")
    names = tried(build_int8(small_network(), BEST, DATA))
    assert names[0] == "floating point"
    assert WIDE_FLOATS in names
    assert sum(WIDE_REST in n for n in names) == 1
    assert not any(WIDE_FLOATS in n or WIDE_REST in n for n in tried(build_int8(small_network(), CONFIG, DATA))), "no 16 bits are permitted"


@VNNI
def test_engines_without_sixteen_bits_are_not_tried_twice(monkeypatch):
    monkeypatch.setattr(quantized, "small_type", lambda plan: None)
    assert not any(WIDE_FLOATS in n or WIDE_REST in n for n in tried(build_int8(small_network(), BEST, DATA)))


@VNNI
@pytest.mark.skipif("avx512_bf16" not in get_backend("cpu").features, reason="this CPU has no instructions for BF16")
@pytest.mark.parametrize("wanted", [WIDE_FLOATS, "int8, the rest in FP32"])
def test_what_is_kept_has_no_sixteen_bits_and_is_locked(wanted, monkeypatch, tmp_path):
    monkeypatch.setattr(quantized, "small_type", lambda plan: "bf16")
    monkeypatch.setattr(quantized._Making, "looks_up", lambda self: False)
    monkeypatch.setattr(quantized, "slow_layers", lambda before, after, layers: frozenset())
    keep(monkeypatch, wanted)
    plan = build_int8(small_network(), BEST, DATA)
    assert small_type(plan) is None
    assert any(is_quantized(x) for x in plan.network.layers) == wanted.startswith("int8")
    save_lock(plan, tmp_path / "lock.json")
    made = build_int8(small_network(), dataclasses.replace(BEST, lock=str(tmp_path / "lock.json")), Calibration(samples=no_calibration))
    assert plan_digest(made) == plan_digest(plan)
