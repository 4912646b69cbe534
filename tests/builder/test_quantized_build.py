"""Quantized engines: built, verified, selected by time; rounding ties are permitted, wrong scales are not."""

import dataclasses
import sys
from pathlib import Path

import numpy as np
import pytest

sys.path[:0] = [str(Path(__file__).parents[1] / folder) for folder in ("passes", "precision")]
from test_calibration import samples, small_network
from test_pass_quantize import residual_network

from support.isa import VNNI
from whet.builder import build
from whet.builder.config import BuildConfig
from whet.builder.precision.int8 import Calibration, build_int8, find_slow_layers, make_placeholder_ranges, prepare
from whet.builder.verify.rounding_ties import has_ties, run_with_nudged_scales
from whet.network import Network, parse_type
from whet.ops import run_network
from whet.precision import calibrate, find_quantization_sites, quantize
from whet.runtime import Runtime
from whet.tactics import TACTICS, is_quantized, load_tactics, tactic
from whet.tactics.cpu.reference.numpy_reference import NumpyCall, NumpyKernel, NumpyReference

QUICK = {"timing_cache": "", "threads": 1, "avg_timing": 1, "optimization_level": 1, "whole_engines": 1}
load_tactics("cpu")


def profile(n, h):
    shape = {"x": (n, 3, h, h)}
    return ((shape, shape, shape),)


@VNNI
def test_an_explicit_network_runs_in_integers():
    net = residual_network()
    plan = build(net, BuildConfig(profiles=profile(2, 16), **QUICK))
    quantized = [x for x in plan.network.layers if is_quantized(x)]
    assert len(quantized) == 6
    assert all(plan.choices[x.name].tactic.startswith("cpu/onednn_q") for x in quantized)
    x = {"x": np.random.default_rng(0).standard_normal((2, 3, 16, 16)).astype(np.float32)}
    want, got = run_network(net, x)["y"], Runtime().load(plan).create_context().run(x)["y"]
    assert np.abs(got - want).max() < 0.02 * np.abs(want).max()


@VNNI
def test_the_fastest_of_three_is_kept_and_reported():
    config = BuildConfig(profiles=profile(1, 12), precisions=("int8",), **QUICK)
    plan = build_int8(small_network(), config, Calibration(samples=lambda: samples(6)))
    choice = plan.report.precision_choice
    assert choice[0].what == "floating point"
    assert choice[1].what.startswith("int8")
    (kept,) = [c for c in choice if c.kept]
    assert plan.report.latency_ms == kept.ms
    # within the noise the engine with fewer integers is kept; beyond it, the fastest
    assert kept.ms <= 1.02 * min(c.ms for c in choice) + 1e-9
    floats = kept.what == "floating point"
    assert any(is_quantized(x) for x in plan.network.layers) != floats
    assert any("INT8 pays: " in n for n in plan.report.info) != floats, "an improvement is not a warning"
    assert any("does not pay here" in n for n in plan.report.notes) == floats


def test_without_data_ranges_are_synthetic_and_reported():
    config = BuildConfig(backend="null", profiles=profile(1, 12), precisions=("int8",), timing_cache="")
    plan = build_int8(small_network(), config, Calibration())
    assert any("INVENTED" in n for n in plan.report.notes)
    made = prepare(small_network(), config)
    found = make_placeholder_ranges(made)
    assert found.tensors["a"].low == 0.0  # after a Relu
    assert found.tensors["x"].low == -4.0


def test_a_network_without_weights_is_reported():
    net = Network("plain")
    net.mark_output(net.add("Relu", net.add_input("x", parse_type("f32[1,3,12,12]"))), "y")
    plan = build_int8(net, BuildConfig(precisions=("int8",), **QUICK), Calibration())
    assert any("no convolution or product" in n for n in plan.report.notes)


@VNNI
def test_slower_layers_are_found():
    net = small_network()
    config = BuildConfig(profiles=profile(1, 12), **QUICK)
    made = prepare(net, config)
    layers = find_quantization_sites(made).layers
    floats, integers = build(net, config), build(quantize(made, calibrate(made, samples(2))), config)
    for plan, ms in ((floats, 1.0), (integers, 0.5)):
        plan.report.layer_ms = {x.name: ms for x in plan.network.layers}
    reformats = sum(x.op == "Reformat" for x in integers.network.layers)
    fine = find_slow_layers(floats, integers, layers)
    slow_one = next(x.name for x in integers.network.layers if is_quantized(x) and x.name.startswith("e"))
    integers.report.layer_ms[slow_one] = 9.0
    assert find_slow_layers(floats, integers, layers) - fine == {"e"}, reformats


def test_ties_are_found_and_are_small():
    net = quantize(small_network(), calibrate(small_network(), samples(4)))
    assert has_ties(net)
    assert not has_ties(small_network())
    x = samples(1)[0]
    truth = run_network(net, x, widen=True)["y"]
    for (moved,) in run_with_nudged_scales(net, x):
        assert moved.shape == truth.shape
        assert np.abs(moved - truth).max() <= 0.05 * np.abs(truth).max()


def test_a_tie_shows_in_the_nudged_network():
    """All values are halfway between two integers; the perturbation moves each to another integer."""
    net = Network("ties")
    x = net.add_input("x", parse_type("f32[1,8]"))
    s, z = net.constant(np.float32(1), "s"), net.constant(np.int8(0), "z")
    net.mark_output(net.add("DequantizeLinear", net.add("QuantizeLinear", x, s, z), s, z), "y")
    feed = {"x": np.arange(8, dtype=np.float32)[None] * 2 + np.float32(1.5)}  # rounds half to even: 2, 4, 6, ...
    (up,), (down,), *_ = run_with_nudged_scales(net, feed)
    assert np.array_equal(down[0] - up[0], np.ones(8))


@pytest.mark.parametrize("added", [False, True])
def test_a_tie_of_a_computed_scale_shows_in_the_nudged_network(added):
    """As in models that are quantized at run time: the scale is computed from the values."""
    net = Network("computed")
    x = net.add_input("x", parse_type("f32[1,4]"))
    s = net.add("Mul", net.add("ReduceMax", x, keepdims=0), net.constant(np.float32(0.01), "hundredth"))
    z = net.constant(np.int8(0), "z")
    net.mark_output(net.add("QuantizeLinear", x, s, z), "y")
    feed = {"x": np.array([[100, 7.5, -2.5, 0.4999 if added else 0]], np.float32)}
    values = [y[0] for (y,) in run_with_nudged_scales(net, feed)]
    assert {float(y[1]) for y in values} == {7, 8}
    assert {float(y[3]) for y in values} == ({0, 1} if added else {0})


def test_a_small_value_near_a_tie_shows_in_the_nudged_network():
    """A value near half a step is the sum of terms as large as the largest value: its error is relative to them, not to the sum."""
    net = Network("small")
    x = net.add_input("x", parse_type("f32[1,2]"))
    s, z = net.constant(np.float32(1), "s"), net.constant(np.int8(0), "z")
    net.mark_output(net.add("DequantizeLinear", net.add("QuantizeLinear", x, s, z), s, z), "y")
    feed = {"x": np.array([[120, 0.4999]], np.float32)}
    assert {float(y[0, 1]) for (y,) in run_with_nudged_scales(net, feed)} == {0.0, 1.0}
    assert {float(y[0, 0]) for (y,) in run_with_nudged_scales(net, feed)} == {120.0}


@pytest.mark.parametrize("off", [2, 1])
def test_a_wrong_integer_kernel_is_found_and_banned(off):
    """An integer off by two in every quantized convolution is a wrong kernel: named, banned, replaced. Off by one is a permitted tie."""
    before = dict(TACTICS)

    class Call(NumpyCall):
        def run(self):
            super().run()
            flat = self.writes[0].reshape(-1)
            flat[0] = flat[0] - off if flat[0] > 100 else flat[0] + off

    class Kernel(NumpyKernel):
        implementation = "planted"

        def enqueue(self, args, stream):
            stream.record(Call(self, args))

    class PlantedQuantized(NumpyReference):
        fallback, quantized, ops = False, True, ("Conv",)

        def plan(self, layer, signature, config, machine):
            return Kernel(layer, signature)

    PlantedQuantized.__module__ = "whet.tactics.cpu.planted_quantized"
    tactic(PlantedQuantized)
    try:
        config = BuildConfig(profiles=profile(1, 12), tactic_sources=("-cpu/onednn_qconv",), **QUICK)
        plan = build(quantize(small_network(), calibrate(small_network(), samples(4))), config)
    finally:
        TACTICS.clear()
        TACTICS.update(before)
    banned = plan.report.banned
    storing = [x.name for x in plan.network.layers if x.composite == "Conv" and is_quantized(x) and not x.output.dtype.is_float]
    if off == 1:
        assert storing
        assert not any("integers differ" in reason for _, _, reason in banned)
        assert any(plan.choices[n].tactic == "cpu/planted_quantized" for n in storing)
        return
    assert any("cpu/planted_quantized" in what and "integers differ" in reason for _, what, reason in banned)
    assert all(plan.choices[n].tactic != "cpu/planted_quantized" for n in storing)
    assert any("banned" in why for _, why in plan.report.unfused), "no other integer kernel: its parts compute it in floating point"


@pytest.mark.parametrize("fails", [False, True])
def test_only_the_kept_engine_is_verified_and_all_if_it_fails(fails, monkeypatch):
    import whet.builder.select.verified_search as searching
    import whet.builder.verify.verify_selected as verified

    calls = []

    def noting(where):
        real = where.verify_once

        def verify(plan, source, *arguments):
            calls.append(where.__name__)
            result = real(plan, source, *arguments)
            return dataclasses.replace(result, probe=None) if fails and where is verified else result

        monkeypatch.setattr(where, "verify_once", verify)

    noting(searching)
    noting(verified)
    config = BuildConfig(profiles=profile(1, 12), precisions=("int8",), **QUICK)
    plan = build_int8(small_network(), config, Calibration(samples=lambda: samples(4), method="minmax"))
    assert plan.report.verification.failures == []
    assert plan.report.verification.layers == len(plan.network.layers)
    assert plan.probe is not None
    assert calls[0] == "whet.builder.verify.verify_selected"
    assert len(calls) == 1 if not fails else len(calls) > 2 and set(calls[1:]) == {"whet.builder.select.verified_search"}
