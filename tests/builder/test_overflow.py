"""Values that a smaller storage type cannot hold: the engine is refused, and the layer goes back to a type that holds them."""

import numpy as np
import pytest

from whet.backends import get_backend
from whet.builder import BuildConfig, build
from whet.builder.verify.emulation import emulate
from whet.builder.verify.overflows import Overflow, count_lost_values, find_overflow, round_within_range
from whet.errors import VerificationError
from whet.network import BF16, F8E4M3, F16, F32, I8, Network, parse_network, parse_type
from whet.ops import run_network
from whet.runtime import Engine
from whet.tactics import TACTICS, Operand, Signature, Tactic, load_tactics, tactic
from whet.tactics.cpu.reference.numpy_reference import NumpyKernel, run_reference

load_tactics("cpu")
SIZE = 8
ROUNDED = {"int8": (I8, 127), "fp8": (F8E4M3, 448)}



@pytest.fixture(params=[F16, BF16], ids=["f16", "bf16"])
def small(request):
    """A type of 16 bits, and a tactic for products and Relu that stores their tensors in it, on any CPU."""
    dtype, before = request.param, dict(TACTICS)
    for name in set(TACTICS) - {"cpu/numpy_reference", "cpu/numpy_reformat"}:
        del TACTICS[name]

    def compute(layer, arrays):
        """The reference in float32 on stored values, rounded to the type."""
        wide = [a if t is None or not t.dtype.is_float else a.astype("f4") for t, a in zip(layer.inputs, arrays, strict=True)]
        with np.errstate(all="ignore"):
            return [a.astype(dtype.numpy) for a in run_reference(layer, wide)]

    class SmallProduct(Tactic):
        name = "cpu/small_product"
        ops = ("MatMul", "Gemm", "Relu")

        def signatures(self, layer, backend):
            def store(t):
                return None if t is None or t.is_constant else Operand("linear", dtype if t.dtype == F32 else t.dtype)

            return [Signature(tuple(map(store, layer.inputs)), tuple(map(store, layer.outputs)))]

        def plan(self, layer, signature, config, backend):
            return NumpyKernel(layer, signature, compute, 2.0**-7)

    SmallProduct.__module__ = "whet.tactics.cpu.small_product"
    tactic(SmallProduct)
    yield dtype
    TACTICS.clear()
    TACTICS.update(before)


def make_network(weights, rounded=None):
    """Values up to 1, then up to the sum of two weights, by a product or by a DequantizeLinear, a Relu, and a product that makes them small again."""
    net = Network("overflow")
    c = net.add("Clip", net.add_input("x", parse_type("f32[4,8]")), *(net.constant(np.float32(v)) for v in (0.999, 1)))
    first, second, largest = (np.float32(v) for v in (*weights, sum(weights)))
    if rounded is None:
        one = np.eye(SIZE, dtype="f4")
        a = net.add("MatMul", c, net.constant(one * first + np.roll(one, 1, axis=0) * second), name="a")
    else:
        dtype, top = ROUNDED[rounded]
        q = net.add("QuantizeLinear", c, net.constant(np.float32(1 / top)), output_dtype=dtype)
        a = net.add("DequantizeLinear", q, net.constant(np.float32(largest / top)), name="a")
    back = net.constant(np.eye(SIZE, dtype="f4") / np.float32(min(largest, 1e30)))
    net.mark_output(net.add("MatMul", net.add("Relu", a, name="b"), back, name="y"), "y")
    return net


def plan_of(net, dtype, constraints="prefer", **more):
    flag = "fp16" if dtype == F16 else "bf16"
    demands = (("a", flag), ("b", flag), ("y", flag))
    config = BuildConfig(
        threads=1, timing_cache="", optimization_level=1, whole_engines=1, avg_timing=1, precisions=(flag,), layer_precisions=demands,
        precision_constraints=constraints, **more,
    )  # fmt: skip
    return build(net, config)


def list_types(plan):
    return {d for c in plan.choices.values() for _, d in c.outputs}


def beyond(dtype):
    """Two weights that the type holds, and their sum not."""
    return (5e4, 5e4) if dtype == F16 else (3.389e38, 1e36)


@pytest.mark.parametrize("rounded", [None, "int8", "fp8"])
def test_a_layer_that_overflows_goes_back_to_float32(small, rounded):
    net = make_network(beyond(small), rounded)
    plan = plan_of(net, small)
    x = np.linspace(-3, 3, 32, dtype="f4").reshape(4, 8)
    want, got = run_network(net, {"x": x})["y"], Engine(plan, get_backend("cpu", threads=1))({"x": x})["y"]
    assert np.isfinite(want).all()
    np.testing.assert_allclose(got, want, rtol=2e-2, atol=2e-2 * np.abs(want).max())
    text = " ".join(plan.report.notes)
    assert f"does not use {small}: %" in text, text
    assert f"and {small} holds at most" in text
    assert any(b.kernel.startswith(f"{small} storage of %") for b in plan.report.banned)


@pytest.mark.parametrize("rounded", [None, "int8", "fp8"])
def test_a_layer_within_the_range_is_left_alone(small, rounded):
    plan = plan_of(make_network((500, 500), rounded), small)
    assert small.name in list_types(plan)
    assert not plan.report.banned


def test_a_demand_that_cannot_be_met_is_an_error(small):
    net = make_network(beyond(small))
    with pytest.raises(VerificationError, match=r"'y' are infinite or NaN where FP32 has finite ones: %.*holds at most.*no kernel that stores"):
        plan_of(net, small, "obey")


def test_finite_errors_of_an_overflow_are_refused(small):
    """A number divided by infinity is 0: the emulation's error would be as large as the engine's, and excuses nothing."""
    net = make_network(beyond(small))
    (b,) = (t for x in net.layers for t in x.outputs if t.name == "b")
    net.outputs = [net.add("Div", net.constant(np.float32(min(sum(beyond(small)), 1e30))), b, name="z")]
    plan = plan_of(net, small)
    x = np.linspace(-3, 3, 32, dtype="f4").reshape(4, 8)
    (got,), (want,) = Engine(plan, get_backend("cpu", threads=1))({"x": x}).values(), run_network(net, {"x": x}).values()
    np.testing.assert_allclose(got, want, rtol=2e-2)
    assert any(f"does not use {small}: %" in note for note in plan.report.notes)


def test_values_beyond_the_range_are_kept_and_counted():
    a = np.array([1.0 + 2**-12, 1e5, -1e6, np.inf, np.nan], "f4")
    np.testing.assert_array_equal(round_within_range(a, F16), np.array([1, 1e5, -1e6, np.inf, np.nan], "f4"))
    np.testing.assert_array_equal(round_within_range(a, BF16)[1:], a.astype(BF16.numpy).astype("f4")[1:])
    move = 'Reformat(%y, source_format="linear", source_dtype="f32", format="linear", dtype="f16")'
    net = parse_network(f"network n lowered\nin %x: f32[5]\n%y = Relu(%x)\n%z = {move}\nout %z\n")
    relu, reformat = net.layers
    assert find_overflow("r", reformat.output, a, F16) == Overflow(relu.name, "y", "f16", 1e6, 65504.0)
    assert find_overflow("r", relu.needs(0), a, F16) == Overflow("r", "x", "f16", 1e6, 65504.0)
    assert find_overflow("r", relu.output, a, BF16) is None
    got = np.array([np.inf, np.nan, 1, np.nan], "f4")
    assert count_lost_values(got, np.array([1, 2, 3, np.inf]), np.zeros(4)) == 2
    assert count_lost_values(got.astype("f2"), np.array([1e5, 2, 3, 4])) == 2
    assert count_lost_values(np.array([1, 2]), np.array([1, np.inf])) == 0


def test_the_emulation_does_not_overflow(small):
    net = make_network(beyond(small))
    plan, overflows = plan_of(net, small, verify=False), []
    assert small.name in list_types(plan)
    x = np.linspace(-3, 3, 32, dtype="f4").reshape(4, 8)
    (got,) = emulate(plan, {"x": x}, overflows=overflows).values()
    np.testing.assert_allclose(got, run_network(net, {"x": x})["y"], rtol=2e-2, atol=1e-6)
    assert {o.dtype for o in overflows} == {small.name}
