"""Verification finds a wrong kernel, names it, bans it, and the build continues without it."""

import dataclasses

import numpy as np
import pytest
from nets import inputs, residual

from whet.backends import get_backend
from whet.builder import BuildConfig, build
from whet.builder.verify.differences import compute_relative_error
from whet.builder.verify.error_bounds import FACTOR, FLOOR
from whet.errors import BackendError, VerificationError
from whet.network import F32, Network, parse_type
from whet.ops import run_network
from whet.runtime import bind

QUICK = BuildConfig(timing_cache="", avg_timing=1, whole_engines=1)


def scale_first(call):
    call.writes[0].reshape(-1)[0] += 0.01 * np.abs(call.writes[0]).max()


COMPILED = ("-ONEDNN", "-INDIRECT", "-LINEAR", "-STRIDED", "-LAYER", "-DIRECT", "-WINOGRAD", "-POINTWISE", "-ELEMENTWISE", "-REDUCE")


def only(*names):
    return dataclasses.replace(QUICK, tactic_sources=(*COMPILED, "-VIEW", *names))


def test_a_wrong_kernel_is_found_named_banned_and_replaced(plant):
    plant(scale_first)
    net = residual()
    plan = build(net, only())  # the planted tactic is listed before the fallback, so it is selected first
    banned = plan.report.banned
    assert {what.split()[0] for _, what, _ in banned} == {"cpu/planted"}
    assert any("conv2" in reason and "cpu/planted" in reason and "allowed is 1e-05" in reason for _, _, reason in banned)
    assert {c.tactic for c in plan.choices.values()} == {"cpu/numpy_reference"}
    rows = plan.report.candidates[next(n for n in plan.choices if n.startswith("conv"))]
    assert any(r.tactic == "cpu/planted" and r.reason.startswith("failed verification") for r in rows)
    feed = inputs(net)
    bound = bind(plan, get_backend("cpu"))
    bound.feed(feed)
    bound.run()
    want = run_network(net, feed, widen=True)["y"]
    assert np.abs(bound.fetch()["y"] - want).max() <= 1e-5 * np.abs(want).max()


def test_without_verification_the_wrong_kernel_ships(plant):
    plant(scale_first)
    plan = build(residual(), dataclasses.replace(only(), verify=False))
    assert "cpu/planted" in {c.tactic for c in plan.choices.values()}
    assert plan.probe == {}


def test_a_kernel_wrong_only_outside_the_normal_range_is_found_on_real_inputs(plant):
    def clip(call):  # wrong only beyond 1e5; verification's own inputs are smaller
        np.clip(call.writes[0], -1e5, 1e5, out=call.writes[0])

    plant(clip)
    net = residual()
    assert "cpu/planted" in {c.tactic for c in build(net, only()).choices.values()}
    loud = {"x": inputs(net)["x"] * 1e6}
    assert "cpu/planted" not in {c.tactic for c in build(net, only(), inputs=loud).choices.values()}


def test_unexpected_nan_is_found(plant):
    def nan(call):
        call.writes[0].reshape(-1)[-1] = np.nan

    plant(nan)
    plan = build(residual(), only())
    assert any("NaN" in reason for _, _, reason in plan.report.banned)


@pytest.mark.parametrize("level", [0, 3])
def test_a_kernel_that_fails_at_run_time_is_banned(plant, level):
    runs = []

    def fail(call):
        runs.append(1)
        if level == 0 or len(runs) > 3:  # at level 3: after it was timed
            raise BackendError("status 5")

    plant(fail)
    plan = build(residual(), dataclasses.replace(only(), optimization_level=level))
    assert any("fails at run time" in reason and "status 5" in reason for _, _, reason in plan.report.banned)
    assert {c.tactic for c in plan.choices.values()} == {"cpu/numpy_reference"}


def test_without_a_correct_kernel_the_build_fails_and_names_the_layer(plant):
    plant(scale_first, ops=("*",), name="planted_all")
    with pytest.raises(Exception, match=r"failed verification.*'conv") as e:
        build(residual(), dataclasses.replace(QUICK, tactic_sources=(*COMPILED, "-cpu/numpy_reference")))
    assert type(e.value).__name__ == "NoTacticError"


def test_a_wrong_graph_pass_is_a_network_error(monkeypatch):
    import whet.builder.lowering as module

    lower = module.lower

    def broken(net, **options):
        made, log = lower(net, **options)
        fc = next(layer for layer in made.layers if "fc" in layer.sources)
        bias = next(t for t in fc.inputs if t.is_constant and t.type.rank == 1)
        wrong = made.constant(bias.array() * np.float32(1.01), "wrong")
        fc.inputs = tuple(wrong if t is bias else t for t in fc.inputs)
        return made, log

    monkeypatch.setattr(module, "lower", broken)
    with pytest.raises(VerificationError, match=r"output 'y' is off by .*every layer is within its own bound.*passes=\('none',\)"):
        build(residual(), QUICK)


def test_accumulated_error_bans_the_least_accurate_kernels(plant):
    """Each layer's error is within its tactic's bound, but the accumulated error exceeds that of FP32: other kernels replace them."""
    loose = plant(lambda call: np.multiply(call.writes[0], 1 + 4e-3, out=call.writes[0]), name="planted_loose")
    plan_it = loose.plan

    def plan(self, layer, signature, config, machine):
        kernel = plan_it(self, layer, signature, config, machine)
        kernel.rtol = 1e-2
        return kernel

    loose.plan = plan
    plant(lambda call: None, name="planted_sound")
    plan = build(residual(), dataclasses.replace(only(), optimization_level=0))  # nothing is timed: the first of them is selected
    banned = plan.report.banned
    assert {what for _, what, _ in banned} == {"cpu/planted_loose"}
    assert all("nearest to its bound" in why for *_, why in banned)
    assert plan.report.verification.network_error <= plan.report.verification.network_bound
    assert (FACTOR, FLOOR) == (4.0, 1e-5), "the documented bound: 4 times an emulation's error, at least 1e-5"
    assert "cpu/planted_sound" in {c.tactic for c in plan.choices.values()}


def test_integers_are_compared_exactly(plant):
    def add_one(call):
        call.writes[0].reshape(-1)[0] += 1

    plant(add_one, ops=("Add",), name="planted_add")
    net = Network("ints")
    x = net.add_input("x", parse_type("i64[5]"))
    net.mark_output(net.add("Add", x, x), "y")
    plan = build(net, only())
    assert any("1 of 5 integers differ" in reason for _, _, reason in plan.report.banned)


@pytest.mark.parametrize(
    ("got", "ref", "error"),
    [
        ([1, 2], [1, 2], 0.0),
        ([0, 0], [0, 0], 0.0),
        ([np.inf, 2], [np.inf, 2], 0.0),
        ([np.nan, 2], [np.nan, 2], 0.0),
        ([np.nan, 2], [1, 2], np.inf),
        ([np.inf, 2], [-np.inf, 2], np.inf),
        ([-3.4028235e38, 2], [-np.inf, 2], np.inf),  # kernels that start from the lowest value give this for a row of -inf
        ([0, 0.5], [0, 0], 0.5),
        ([3, 4.5], [3, 4], 0.125),
        ([np.inf], [1e39], 0.0),  # overflows in f32, as it must
        ([], [], 0.0),
    ],
)
def test_relative_error(got, ref, error):
    assert compute_relative_error(np.array(got, "f4"), np.array(ref, "f8"))[0] == pytest.approx(error)


@pytest.mark.parametrize("more", [(4,), ()])
def test_sizes_that_a_network_computes_with_may_differ_at_other_batches(more):
    """Encoders of transformers read the Shape of their batch; its values at batch 4 are not those at batch 1."""
    net = Network("sizes")
    x = net.add_input("x", parse_type(f"f32[{','.join(map(str, ('N', *more)))}]"))
    total = net.add("ReduceSum", net.add("Cast", net.add("Shape", x), to=F32), keepdims=0)
    net.mark_output(net.add("Mul", net.add("Relu", x), total), "y")
    shapes = tuple({"x": (n, *more)} for n in (1, 1, 4))
    plan = build(net, dataclasses.replace(QUICK, profiles=(shapes,)))
    assert "Shape" in [layer.op for layer in plan.network.layers]
    assert plan.report.verification.failures == []
    assert plan.report.banned == []


def test_the_floor_equals_the_documented_one():
    assert FLOOR == 1e-5
