"""Engines for the objective "size": weights have 8 bits, also in layers that compute in floating point; the fastest of them is kept."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import numpy as np
import pytest

sys.path[:0] = [str(Path(__file__).parents[1] / folder) for folder in ("passes", "precision")]
from test_calibration import samples, small_network

from whet.builder import build_int8, save_lock
from whet.builder.config import BuildConfig
from whet.builder.lock.relock import Quantization, read_recipe
from whet.builder.precision.calibration import make_placeholder_ranges, prepare
from whet.builder.precision.int8 import Calibration, quantize_network
from whet.engine import engine_bytes, read_engine
from whet.ops import run_network
from whet.precision.budget import Budget
from whet.precision.insert import fake_quantize_weights
from whet.runtime import Runtime

SHAPE = {"x": (1, 3, 12, 12)}
CONFIG = BuildConfig(
    profiles=((SHAPE, SHAPE, SHAPE),), precisions=("int8",), objective="size", timing_cache="", threads=1, avg_timing=1, optimization_level=1,
    whole_engines=1,
)  # fmt: skip
CALIBRATION = Calibration(samples=lambda: samples(6))


def list_weighted_layers(net):
    return [x for x in net.layers if x.op in ("Conv", "Gemm", "MatMul")]


def test_weights_of_layers_in_floating_point_have_8_bits():
    net = prepare(small_network(), CONFIG)
    layers = list_weighted_layers(net)
    every = frozenset(x.name for x in layers)
    small = quantize_network(net, Quantization(make_placeholder_ranges(net), every, small_weights=True))
    assert [x.op for x in small.layers if x.op == "QuantizeLinear"] == [], "activations stay in floating point"
    assert sum(x.op == "DequantizeLinear" for x in small.layers) == len(layers)
    feeds = samples(1)[0]
    for layer in layers:
        rounded = fake_quantize_weights(layer, layer.needs(1).array())
        layer.inputs = (layer.inputs[0], net.constant(rounded, f"{layer.name}.rounded"), *layer.inputs[2:])
    want, got = (next(iter(run_network(n, feeds).values())) for n in (net, small))
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


def test_layers_that_must_stay_in_floating_point_keep_their_weights():
    net = prepare(small_network(), CONFIG)
    first, *others = [x.name for x in list_weighted_layers(net)]
    quantization = Quantization(make_placeholder_ranges(net), frozenset([first, *others]), small_weights=True)
    small = quantize_network(net, quantization, lambda layer: layer.name == first)
    assert sum(x.op == "DequantizeLinear" for x in small.layers) == len(others)


def test_every_engine_of_the_objective_size_has_small_weights():
    plan = build_int8(small_network(), CONFIG, CALIBRATION)
    assert plan.report.precision_choice[0].what == "floating point with 8-bit weights"
    assert read_recipe(plan.report.quantized).small_weights
    data = engine_bytes(plan)
    for t in prepare(small_network(), CONFIG).constants.values():
        if t.type.rank > 1:
            assert t.array().tobytes() not in data
    x = samples(1)[0]
    outputs = [Runtime().load(p).create_context().run(x)["y"] for p in (plan, read_engine(data))]
    np.testing.assert_array_equal(*outputs)


def test_a_lock_keeps_small_weights(tmp_path):
    plan = build_int8(small_network(), CONFIG, CALIBRATION)
    save_lock(plan, tmp_path / "lock.json")
    again = build_int8(small_network(), dataclasses.replace(CONFIG, lock=str(tmp_path / "lock.json")), Calibration())
    assert again.report.quantized == plan.report.quantized
    assert again.model_digest == plan.model_digest


def test_the_floating_point_engine_is_the_fallback_of_a_budget():
    plan = build_int8(small_network(), CONFIG, CALIBRATION, budget=Budget.parse("snr:300"))
    *low, floats = plan.report.precision_choice
    assert [c.holds for c in low] == [False] * len(low)
    assert floats.what == "floating point"
    assert floats.kept
    assert plan.report.quantized is None


@pytest.mark.parametrize("objective", ["latency", "size"])
def test_the_objective_is_an_option_of_the_engine(objective):
    plan = build_int8(small_network(), dataclasses.replace(CONFIG, objective=objective), CALIBRATION)
    assert plan.options["objective"] == objective
    assert any("8-bit weights" in c.what for c in plan.report.precision_choice) == (objective == "size")
