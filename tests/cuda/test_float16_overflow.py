"""On a GPU: layers whose values FP16 cannot hold go back to FP32, and the build says so."""

import numpy as np
import pytest

pytest.importorskip("cuda.bindings", reason="the cuda extra is not installed")
from whet.backends import get_backend
from whet.backends.cuda import driver
from whet.builder import BuildConfig, build
from whet.network import Network, parse_type
from whet.ops import run_network
from whet.runtime import Engine

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(driver.why_unavailable() is not None, reason=str(driver.why_unavailable()))]


def test_a_layer_that_overflows_goes_back_to_float32():
    """Products of values near 1 with two weights of 5e4 in each column, and a product that makes the sums small again."""
    one, net = np.eye(64, dtype="f4"), Network("overflow")
    c = net.add("Clip", net.add_input("x", parse_type("f32[32,64]")), net.constant(np.float32(0.999)), net.constant(np.float32(1)))
    a = net.add("MatMul", c, net.constant((one + np.roll(one, 1, axis=0)) * np.float32(5e4)), name="a")
    back = net.constant(one / np.float32(1e5))
    net.mark_output(net.add("MatMul", net.add("Relu", a, name="b"), back, name="y"), "y")
    demands = tuple((name, "fp16") for name in ("a", "b", "y"))
    config = BuildConfig(
        backend="cuda", timing_cache="", avg_timing=1, whole_engines=1, precisions=("fp16",), layer_precisions=demands, precision_constraints="prefer"
    )  # fmt: skip
    plan = build(net, config)
    x = np.linspace(-3, 3, 32 * 64, dtype="f4").reshape(32, 64)
    want, got = run_network(net, {"x": x})["y"], Engine(plan, get_backend("cuda"))({"x": x})["y"]
    assert np.isfinite(got).all()
    np.testing.assert_allclose(got, want, rtol=2e-2, atol=2e-2 * np.abs(want).max())
    assert any("does not use f16: %" in note for note in plan.report.notes), plan.report.notes
