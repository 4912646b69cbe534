"""--strictNumerics: no kernel that mixes values or loses NaN, fused layers whose kernels all do are unfused."""

import dataclasses

import numpy as np
import pytest

from whet.builder import BuildConfig, build
from whet.network import Network, parse_type
from whet.ops import run_network
from whet.runtime import Runtime
from whet.tactics.cpu._llvm import jit

CONFIG = BuildConfig(threads=1, optimization_level=0, timing_cache="", verify=False)


def network():
    rng = np.random.default_rng(2)
    net = Network("strict")
    x = net.add_input("x", parse_type("f32[1,16,12,12]"))
    for k in range(2):
        w = net.constant(rng.standard_normal((16, 16, 3, 3)).astype(np.float32) / 12, f"w{k}")
        x = net.add("Relu", net.add("Conv", x, w, pads=(1, 1, 1, 1), group=1))
    x = net.add("MaxPool", x, kernel_shape=(2, 2), strides=(2, 2))
    net.mark_output(x)
    return net


@pytest.mark.skipif(jit.why_unavailable() is not None, reason=str(jit.why_unavailable()))
def test_winograd_is_left_out_with_a_reason():
    """Only Winograd is permitted besides the reference, and still not used."""
    sources = ("-ONEDNN", "-INDIRECT", "-cpu/direct_conv")
    usual = build(network(), dataclasses.replace(CONFIG, tactic_sources=sources))
    assert "cpu/winograd_conv" in {c.tactic for c in usual.choices.values()}
    strict = build(network(), dataclasses.replace(CONFIG, tactic_sources=sources, strict_numerics=True))
    assert "cpu/winograd_conv" not in {c.tactic for c in strict.choices.values()}
    reasons = [r.reason for rows in strict.report.candidates.values() for r in rows if r.tactic == "cpu/winograd_conv" and r.reason]
    assert reasons
    assert any("--strictNumerics is given" in r for r in reasons)


def test_nan_reaches_the_same_results_as_in_the_reference():
    """Also through ReLU and MaxPool, whose fast kernels return the other operand."""
    net = network()
    plan = build(net, dataclasses.replace(CONFIG, strict_numerics=True))
    x = np.random.default_rng(0).standard_normal((1, 16, 12, 12)).astype(np.float32)
    x[0, 3, 5, 6] = np.nan
    (want,) = run_network(net, {"x": x}).values()
    (got,) = Runtime(backend="cpu", threads=1).load(plan).create_context().run({"x": x}).values()
    assert 0 < np.isnan(want).sum() < want.size
    np.testing.assert_array_equal(np.isnan(got), np.isnan(want))
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)
