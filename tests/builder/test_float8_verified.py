"""FP8 networks built and verified with planted kernels: correct ones are kept, wrong ones banned; a layer without a correct one becomes float."""

import dataclasses
import sys
from pathlib import Path

import numpy as np
import pytest
from test_verification import QUICK

from whet.builder import build
from whet.builder.precision.permissions import is_float8
from whet.errors import NoTacticError
from whet.network import F8E4M3, Network, parse_type
from whet.ops import run_network
from whet.runtime import Runtime

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from gpu_networks import shorten_ban

BATCH = 7  # more than are verified one by one
ONLY = dataclasses.replace(QUICK, tactic_sources=("-ONEDNN", "-cpu/numpy_reference"))


def float8_chain(channels=16):
    """Three 3x3 convolutions between roundings to e4m3, and a residual over the second."""
    rng, net = np.random.default_rng(3), Network("float8")
    t = net.add_input("x", parse_type(f"f32[{BATCH},{channels},8,8]"))

    def rounded(t, scale):
        s = net.constant(np.float32(scale))
        return net.add("DequantizeLinear", net.add("QuantizeLinear", t, s, output_dtype=F8E4M3), s)

    t = first = rounded(t, 0.01)
    for i in range(3):
        w = (rng.standard_normal((channels, channels, 3, 3)) / np.sqrt(9 * channels)).astype(np.float32)
        s = net.constant((np.abs(w).max(axis=(1, 2, 3)) / 448).astype(np.float32))
        q = net.constant((w / s.array().reshape(-1, 1, 1, 1)).astype(F8E4M3.numpy))
        bias = net.constant(np.zeros(channels, np.float32))
        t = net.add("Conv", t, net.add("DequantizeLinear", q, s, axis=0), bias, pads=(1,) * 4, name=f"conv{i}")
        t = net.add("Relu", net.add("Add", t, first) if i == 1 else t)
        t = rounded(t, 0.02) if i < 2 else t
    net.mark_output(t, "y")
    return net


def of_float8(change, planting, configs=1):
    """A tactic for convolutions in float8 whose results are modified by `change`."""
    made = planting(change, name="planted_float8")
    made.quantized = made.float8 = True
    made.configs = lambda self, layer, signature, machine: [(("way", i),) for i in range(configs)]


def of_floats(planting, ops=("*",)):
    """A correct tactic for all other layers."""
    made = planting(lambda call: None, ops=ops, name="planted_floats")
    given = made.refuses
    made.refuses = lambda self, layer, signature, machine: given(self, layer, signature, machine) or ("is for floats" if is_float8(layer) else None)


def answers(plan, net):
    x = {"x": np.random.default_rng(1).standard_normal((BATCH, 16, 8, 8)).astype(np.float32)}
    got, want = Runtime().load(plan).create_context().run(x)["y"], run_network(net, x)["y"]
    return float(np.abs(got - want).max() / np.abs(want).max())


def test_correct_kernels_are_kept_in_a_batch_verified_on_a_few_samples(plant):
    """Regression: verification refused each of them, because its reference of some samples had whole numbers in place of float8 values."""
    of_float8(lambda call: None, plant)
    of_floats(plant)
    net = float8_chain()
    plan = build(net, ONLY)
    assert plan.report.verification.images is not None
    assert plan.report.banned == []
    assert sum(map(is_float8, plan.network.layers)) == 3
    assert answers(plan, net) < 0.01


def off_by_a_step(call):
    """Replaces every float8 value by the next larger one: far beyond rounding ties."""
    if call.writes[0].dtype == F8E4M3.numpy:
        bits = call.writes[0].view(np.uint8)
        bits[(bits > 8) & (bits < 100)] += 1


@pytest.mark.parametrize("configs", [1, 9])
def test_a_layer_without_a_correct_float8_kernel_becomes_float_with_the_reason(plant, configs):
    of_float8(off_by_a_step, plant, configs)
    of_floats(plant)
    net = float8_chain()
    plan = build(net, ONLY)
    assert not any(c.tactic == "cpu/planted_float8" and o[1] == "f8e4m3" for c in plan.choices.values() for o in c.outputs)
    assert answers(plan, net) < 0.05
    apart = dict(plan.report.unfused)
    assert apart
    assert all("banned" in why and "numbers differ" in why for why in apart.values())
    assert any("is unfused" in n for n in plan.report.notes)
    assert len(plan.report.banned) <= 4 * 3, "a tactic with only wrong configurations is not tried in each of them"


def test_without_another_kernel_the_build_fails_and_names_the_wrong_ones(plant):
    of_float8(off_by_a_step, plant)
    of_floats(plant, ops=("QuantizeLinear", "Relu", "Add"))
    with pytest.raises(NoTacticError, match="failed verification"):
        build(float8_chain(), ONLY)


def test_a_float8_kernel_with_one_wrong_element_in_the_batch_is_found(plant):
    def one_image(call):
        if call.writes[0].dtype == F8E4M3.numpy:
            off_by_a_step(type("Part", (), {"writes": [call.writes[0][BATCH // 2 + 1 : BATCH // 2 + 2]]}))

    of_float8(one_image, plant)
    of_floats(plant)
    plan = build(float8_chain(), ONLY)
    assert plan.report.banned
    assert all("place in the batch" in why for *_, why in plan.report.banned)


def test_the_short_text_of_a_ban_keeps_kernel_error_and_bound(plant):
    """Regression: it ended after 400 characters, within the names of the layer's nodes."""
    of_float8(off_by_a_step, plant)
    of_floats(plant)
    (*_, why), *_ = build(float8_chain(), ONLY).report.banned
    text = "banned: " + why.replace("from ", "from " + "encoder/layer/attention/self/query/MatMul, " * 20, 1)
    short = shorten_ban(text)
    assert len(short) <= 400
    assert short.startswith("banned: failed verification: Fused")
    assert "cpu/planted_float8" in short
    assert "allowed is" in short
