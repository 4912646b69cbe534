"""--fp16 on CPUs with AVX512-FP16: a demanded layer is in the kernels' type, other CPUs build as without it, FP16 models
name the flag, a network whose sums overflow stays in FP32."""

import numpy as np
import pytest

from whet.backends import get_backend
from whet.builder import BuildConfig, build
from whet.builder.precision.float16 import build_floats_within
from whet.network import Network, parse_type
from whet.ops import run_network
from whet.precision.budget import Budget
from whet.runtime import Engine


def product(dtype="f32", scale=1.0):
    """Two products with a Relu between."""
    rng, net = np.random.default_rng(0), Network("product")
    x = net.add_input("x", parse_type(f"{dtype}[40,64]"))
    first, second = (net.constant((scale * rng.standard_normal((64, 64)) / 8).astype(x.dtype.numpy)) for _ in range(2))
    y = net.add("MatMul", net.add("Relu", net.add("MatMul", x, first, name="first")), second, name="second")
    net.mark_output(y, "y")
    return net


def can_compute():
    return "f16" not in get_backend("cpu").capabilities.unsupported_types


CAPABLE = pytest.mark.skipif(not can_compute(), reason="the CPU has no avx512_fp16")


def plan_of(net, **options):
    return build(net, BuildConfig(threads=1, timing_cache="", optimization_level=1, **options))


@CAPABLE
def test_demanded_layers_compute_in_fp16():
    demands = (("first", "fp16"), ("second", "fp16"))
    plan = plan_of(product(), precisions=("fp16",), layer_precisions=demands, precision_constraints="obey")
    chosen = [c for layer, c in plan.choices.items() if "first" in layer or "second" in layer]
    assert {c.outputs[0][1] for c in chosen if "linear" in c.tactic or "matmul" in c.tactic} == {"f16"}
    x = np.random.default_rng(1).standard_normal((40, 64)).astype(np.float32)
    got = Engine(plan, get_backend("cpu", threads=1))({"x": x})["y"]
    want = run_network(product(), {"x": x})["y"]
    assert np.abs(got - want).max() < 3e-3 * np.abs(want).max()


def test_without_the_permission_or_the_instructions_nothing_is_fp16(monkeypatch):
    assert all(c.outputs[0][1] != "f16" for c in plan_of(product()).choices.values())
    for user in ("conv._small_float_tactic", "elementwise.elementwise", "elementwise.reduce"):
        monkeypatch.setattr(f"whet.tactics.cpu.{user}.list_small_floats", lambda features: [])
    plan = plan_of(product(), precisions=("fp16",))
    assert all(c.outputs[0][1] != "f16" for c in plan.choices.values())


def test_fp16_models_name_the_flag_where_it_helps():
    text = " ".join(plan_of(product("f16")).report.notes)
    assert "compute in f32" in text
    assert ("--fp16 permits" in text) is can_compute()
    assert "--fp16 permits" not in " ".join(plan_of(product("f16"), precisions=("fp16",)).report.notes)


def test_an_overflow_is_kept_out_by_the_accuracy_budget():
    """Sums of the second product are about a million: infinite in FP16, so that the budget holds in FP32 only."""
    net, data = product(scale=1000.0), [{"x": np.random.default_rng(k).standard_normal((40, 64)).astype(np.float32)} for k in range(3)]
    config = BuildConfig(threads=1, timing_cache="", optimization_level=1, precisions=("fp16",))
    plan, _ = build_floats_within(net, net, config, Budget("snr", 40.0), data)
    want = run_network(net, data[0])["y"]
    assert np.abs(want).max() > 1e6
    assert np.abs(Engine(plan, get_backend("cpu", threads=1))(data[0])["y"] - want).max() < 1e-2 * np.abs(want).max()
