"""The 2:4 guard: 2:4 models stay 2:4 through batch-norm folding, equalization and INT8; the first pass that breaks them is named."""

import dataclasses

import numpy as np
import pytest

from whet.builder import BuildConfig, Calibration, build, build_int8
from whet.builder.lock.relock import Quantization
from whet.builder.lowering import lower_network
from whet.builder.precision.calibration import make_placeholder_ranges, prepare
from whet.builder.precision.int8 import quantize_network
from whet.network import Network, Weight, parse_type
from whet.rewrite import PASSES, Fired, Phase, network_pass
from whet.sparsity import TwoFourGuard, find_first_violation, find_reduction_axis, force_two_four, is_two_four, list_eligible_layers

CONFIG = BuildConfig(backend="null", timing_cache="", optimization_level=3)


def network(zero_channels=()):
    """Convolution, batch norm, Relu, convolution, product; all weights 2:4. `zero_channels` of the first convolution are zero, then there is no
    batch norm."""
    rng = np.random.default_rng(0)
    net = Network("n", "source")

    def constant(*shape):
        return net.constant(rng.standard_normal(shape).astype("f4") / 8)

    x = net.add_input("x", parse_type("f32[2,8,6,6]"))
    w = rng.standard_normal((16, 8, 3, 3)).astype("f4")
    w[list(zero_channels)] = 0
    a = net.add("Conv", x, net.constant(w), pads=(1,) * 4, name="first")
    if not zero_channels:
        scale, shift, mean = constant(16), constant(16), constant(16)
        a = net.add("BatchNormalization", a, scale, shift, mean, net.constant(np.full(16, 2.0, "f4")))
    b = net.add("Conv", net.add("Relu", a), constant(8, 16, 3, 3), pads=(1,) * 4, name="second")
    net.mark_output(net.add("Gemm", net.add("Flatten", b), constant(288, 4), name="third"), "y")
    return force_two_four(net)[0]


@pytest.fixture
def breaking_pass():
    """A pass that fills the weights of `second`, after batch norms are folded; it fires once."""

    @network_pass(phase=Phase.FOLD, after=["fold_batch_norm"], level=0)
    def fill_zeros(g):
        layer = next(x for x in g.layers if x.name == "second")
        w, _ = find_reduction_axis(layer)
        if not is_two_four(w.array(), 1):
            return []
        layer.inputs = (layer.inputs[0], g.net.constant(w.array() + np.float32(1)), *layer.inputs[2:])
        return [Fired("filled", "second")]

    yield
    del PASSES["fill_zeros"]


def test_folding_and_fusion_keep_the_pattern():
    net = network()
    assert len(TwoFourGuard(net).nodes) == 3
    lowered, log = lower_network(net, CONFIG)
    assert log.counts()["fold_batch_norm"] == 1
    assert log.notes == []
    assert len(list_eligible_layers(lowered)[0]) == 3


def test_the_pass_that_breaks_the_pattern_is_named_with_the_group(breaking_pass):
    net = network()
    plan = build(net, CONFIG)
    (note,) = [n for n in plan.report.notes if "2:4" in n]
    assert note.startswith("The pass fill_zeros breaks the 2:4 weights of 'second' (output channel 0, inputs 0-3 at (0, 0) have ")
    assert lower_network(net, dataclasses.replace(CONFIG, verify=False))[1].notes == []
    assert lower_network(net, dataclasses.replace(CONFIG, passes=("-fill_zeros",)))[1].notes == []


def test_zero_channels_stay_where_their_removal_would_move_weights_into_other_groups():
    lowered, log = lower_network(network(zero_channels=range(0, 16, 2)), CONFIG)
    assert log.notes == []
    assert log.counts().get("remove_zero_channels", 0) == 0
    assert len(list_eligible_layers(lowered)[0]) == 3


def test_groups_of_four_zero_channels_are_removed_and_the_pattern_stays():
    lowered, log = lower_network(network(zero_channels=range(4, 12)), CONFIG)
    assert log.counts()["remove_zero_channels"] == 1
    assert log.notes == []
    assert len(list_eligible_layers(lowered)[0]) == 3
    assert [t.shape for t in lowered.constants.values() if t.type.rank == 4 and t.shape[1] == 8]


@pytest.mark.parametrize(("shifted", "merges"), [(0, True), (1, False)])
def test_parallel_convolutions_merge_only_if_the_sum_is_two_four(shifted, merges):
    """Two of four inputs have weights in both branches: the same two, or others."""
    rng = np.random.default_rng(2)
    mask = np.array([1, 1, 0, 0, 1, 1, 0, 0])[:, None, None]
    net = Network("n", "source")
    x = net.add_input("x", parse_type("f32[2,8,6,6]"))
    a = net.add("Conv", x, net.constant((rng.standard_normal((8, 8, 3, 3)) * mask).astype("f4")), pads=(1,) * 4, name="large")
    b = net.add("Conv", x, net.constant((rng.standard_normal((8, 8, 1, 1)) * np.roll(mask, shifted, 0)).astype("f4")), name="small")
    net.mark_output(net.add("Add", a, b), "y")
    lowered, log = lower_network(net, CONFIG)
    assert log.notes == []
    assert log.counts().get("merge_parallel_convs", 0) == merges
    assert len(list_eligible_layers(lowered)[0]) == (1 if merges else 2)


def test_dense_weights_are_not_guarded():
    rng = np.random.default_rng(0)
    net = Network("n", "source")
    x = net.add_input("x", parse_type("f32[2,8]"))
    net.mark_output(net.add("MatMul", x, net.constant(rng.standard_normal((8, 4)).astype("f4"))), "y")
    assert not TwoFourGuard(net).nodes


def test_int8_keeps_the_pattern():
    data = np.random.default_rng(1).standard_normal((4, 2, 8, 6, 6)).astype("f4")
    calibration = Calibration(samples=lambda: [{"x": d} for d in data])
    net = network()
    plan = build_int8(net, dataclasses.replace(CONFIG, precisions=("int8",)), calibration)
    assert not [n for n in plan.report.notes if "breaks the 2:4" in n]
    assert TwoFourGuard(net).check(plan.network) == []
    quantized = quantize_network(prepare(net, CONFIG), Quantization(make_placeholder_ranges(prepare(net, CONFIG))))
    assert len(TwoFourGuard(quantized).nodes) == 3  # weights behind DequantizeLinear
    lowered, log = lower_network(quantized, dataclasses.replace(CONFIG, precisions=("int8",)))
    assert log.notes == []
    assert sum(t.dtype.name == "i8" and t.type.rank > 1 for t in lowered.constants.values()) == 3


def test_nearly_two_four_weights_are_not_eligible_and_the_group_is_named():
    net = network()
    w = next(t for t in net.constants.values() if t.shape == (8, 16, 3, 3))
    changed = w.array().copy()
    changed[5, 8:12, 0, 1] = 1
    w.weight = Weight(changed, w.weight.origin)
    assert list_eligible_layers(net)[1] == {"second": "its weights are not 2:4: output channel 5, inputs 8-11 at (0, 1) have 4 nonzeros"}


def test_the_first_violation_names_its_group():
    w = np.zeros((4, 8, 3, 3), np.float32)
    w[:, ::4] = 1
    assert find_first_violation(w, 1) == ""
    w[2, 4:7, 1, 2] = 1
    assert find_first_violation(w, 1) == "output channel 2, inputs 4-7 at (1, 2) have 3 nonzeros"
    w[1, 0, 0, 0] = np.nan
    assert find_first_violation(w, 1) == "output channel 1, inputs 0-3 at (0, 0) hold a NaN"
    product = np.zeros((8, 5), np.float32)
    product[4:, 3] = 1
    assert find_first_violation(product, 0) == "output channel 3, inputs 4-7 have 4 nonzeros"
    assert find_first_violation(np.zeros((4, 6)), 1) == "6 input channels have no whole groups of four"
