"""The FP8 recipe: excluded layers, bias corrections, optimized weight rounding, and the accuracy of the resulting networks."""

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1]))

from support import datasets, realdata
from support.snr import compute_snr
from whet.builder import BuildConfig, build
from whet.builder.lock.relock import Quantization, make_recipe, read_recipe
from whet.builder.lowering import lower_network
from whet.builder.precision.calibration import Calibration, prepare
from whet.builder.precision.float8 import build_float8, describe_left_out
from whet.builder.precision.float8_ranges import calibrate_float8_ranges, find_sensitive_layers, insert_float8
from whet.builder.verify.engine_values import EngineRun
from whet.errors import BuildError
from whet.frontends import network_from_onnx
from whet.frontends.onnx_writer import save_onnx
from whet.network import F8E4M3, Network, parse_type
from whet.ops import run_network
from whet.precision import Analysis, calibrate, find_quantization_sites, read_cache, select_samples, write_cache
from whet.precision.float8 import (
    SAMPLES,
    compute_mean_inputs,
    compute_mean_shift,
    correct_biases,
    list_excluded_layers,
    pack_rounding,
    round_weights_adaptively,
    skip_sums,
    unpack_rounding,
)
from whet.precision.insert import compute_float8_weight_scales, round_to_e4m3, round_weights_to_float8
from whet.precision.rounding import compute_expected_error, round_rows
from whet.tactics import is_quantized, load_tactics

load_tactics("cpu")


def chain(channels=16, positive=True):
    """Four 3x3 convolutions after ReLUs, with weights that do not sum to zero; the second has two groups and its input has a second reader."""
    rng = np.random.default_rng(5)
    net = Network("chain")

    def w(k, c, r=3):
        return (rng.standard_normal((k, c, r, r)) / np.sqrt(c * r * r) + 0.05).astype(np.float32)

    x = t = net.add_input("x", parse_type("f32[1,3,12,12]"))
    for i, c in enumerate((3, channels, channels, channels)):
        bias = net.constant(np.zeros(channels, np.float32), f"b{i}")
        y = net.add("Conv", t, net.constant(w(channels, c), f"w{i}"), bias, pads=(1,) * 4, name=f"conv{i}")
        t = net.add("Relu", y, name=f"relu{i}")
    pooled = net.add("Flatten", net.add("GlobalAveragePool", t), axis=1)
    net.mark_output(net.add("Gemm", pooled, net.constant(rng.standard_normal((channels, 8)).astype(np.float32), "wg"), name="gemm"), "y")
    assert x is net.inputs[0]
    return net


def residual_chain(blocks, channels=16):
    """A convolution, then blocks of two around skip connections: values on the skip connections are rounded in each block."""
    rng = np.random.default_rng(6)
    net = Network("residual")

    def conv(t, c, gain=1.0):
        w = (gain * rng.standard_normal((channels, c, 3, 3)) / np.sqrt(9 * c)).astype(np.float32)
        return net.add("Conv", t, net.constant(w), net.constant(np.zeros(channels, np.float32)), pads=(1,) * 4, name=f"conv{len(net.layers)}")

    t = net.add("Relu", conv(net.add_input("x", parse_type("f32[1,3,12,12]")), 3))
    for i in range(blocks):
        inner = conv(net.add("Relu", conv(t, channels)), channels, 0.3)
        t = net.add("Relu", net.add("Add", inner, t, name=f"sum{i}"))
    pooled = net.add("Flatten", net.add("GlobalAveragePool", t), axis=1)
    net.mark_output(net.add("Gemm", pooled, net.constant(rng.standard_normal((channels, 8)).astype(np.float32)), name="gemm"), "y")
    return net


def samples(count=40, seed=0):
    rng = np.random.default_rng(seed)
    return [{"x": (rng.standard_normal((1, 3, 12, 12)) + 1).astype(np.float32)} for _ in range(count)]


def test_ends_groups_and_odd_sizes_are_excluded_with_their_reasons():
    out = list_excluded_layers(chain())
    assert out == {
        "conv0": "3 input and 16 output channels: FP8 kernels need multiples of 16 and 8",
        "gemm": "last layer: no later layer averages its rounding error",
    }
    wide = Network("wide")
    x = wide.add_input("x", parse_type("f32[1,16,8,8]"))
    a = wide.add("Relu", wide.add("Conv", x, wide.constant(np.ones((16, 16, 1, 1), np.float32), "w"), name="first"))
    b = wide.add("Relu", wide.add("Conv", a, wide.constant(np.ones((16, 1, 3, 3), np.float32), "d"), group=16, pads=(1,) * 4, name="depthwise"))
    c = wide.add("Add", wide.add("Conv", b, wide.constant(np.ones((16, 16, 1, 1), np.float32), "v"), name="middle"), a)
    wide.mark_output(wide.add("Conv", c, wide.constant(np.ones((16, 16, 1, 1), np.float32), "u"), name="last"), "y")
    reasons = list_excluded_layers(wide)
    assert set(reasons) == {"first", "depthwise", "last"}
    assert reasons["first"].startswith("first layer")
    assert "one group" in reasons["depthwise"]


@pytest.mark.parametrize("norm_at", ["after each sum", "at the end", "nowhere"])
def test_a_normalization_ends_the_way_to_an_output(norm_at):
    """The residual stream of a transformer reaches the output through sums: its products are last layers only without a normalization behind."""
    net, rng = Network("blocks"), np.random.default_rng(2)

    def product(t, name):
        return net.add("MatMul", t, net.constant(rng.standard_normal((32, 32)).astype(np.float32)), name=name)

    def norm(t):
        return net.add("LayerNormalization", t, net.constant(np.ones(32, np.float32)), net.constant(np.zeros(32, np.float32)), axis=-1)

    t = product(net.add_input("x", parse_type("f32[4,32]")), "embed")
    for i in range(2):
        inner = product(net.add("Relu", product(norm(t), f"up{i}")), f"down{i}")
        t = net.add("Add", t, inner)
        t = norm(t) if norm_at == "after each sum" else t
    net.mark_output(norm(t) if norm_at == "at the end" else t, "y")
    last = {"down0", "down1"} if norm_at == "nowhere" else set()
    assert set(list_excluded_layers(net)) == {"embed"} | last


@pytest.mark.parametrize("attrs", [{"pads": (1, 1, 1, 1)}, {"pads": (0, 0, 1, 1), "strides": (2, 2)}, {"dilations": (2, 2), "pads": (2, 2, 2, 2)}])
def test_the_mean_shift_is_measured_per_layer(attrs):
    rng = np.random.default_rng(3)
    net = Network("one")
    x = net.add_input("x", parse_type("f32[2,6,9,9]"))
    w = rng.standard_normal((4, 6, 3, 3)).astype(np.float32)
    net.mark_output(net.add("Conv", x, net.constant(w, "w"), name="conv", **attrs), "y")
    layer = net.layers[0]
    exact = np.abs(rng.standard_normal((2, 6, 9, 9))).astype(np.float32)
    low = round_to_e4m3(exact)
    rounded = net.clone()
    rounded.layers[0].inputs = (rounded.inputs[0], rounded.constant(round_weights_to_float8(layer, w), "q"))
    means = [next(iter(run_network(n, {"x": v}).values())).mean(axis=(0, 2, 3), dtype=np.float64) for n, v in ((net, exact), (rounded, low))]
    shift = compute_mean_shift(layer, compute_mean_inputs(layer, low), compute_mean_inputs(layer, exact))
    np.testing.assert_allclose(shift, means[1] - means[0], atol=1e-6)
    assert np.abs(shift).max() > 1e-4


def test_corrections_raise_the_outputs_snr_on_other_samples():
    net = chain(64)
    ranges = calibrate(net, samples(), method="minmax")
    better = correct_biases(net, ranges, samples(), EngineRun, list_excluded_layers(net))
    assert set(better.corrections) == {"conv1", "conv2", "conv3"}
    fresh = samples(12, seed=9)
    want = [run_network(net, f)["y"] for f in fresh]
    db = [compute_snr(np.stack(want), np.stack([run_network(insert_float8(net, r), f)["y"] for f in fresh])) for r in (ranges, better)]
    assert db[1] > db[0] + 1


def test_the_order_of_samples_changes_nothing():
    """More samples than are used, so that the selection and its halves could differ too."""
    net, data = chain(16), samples(SAMPLES + 9)
    ranges = calibrate(net, data[:4], method="minmax")
    found = [correct_biases(net, ranges, order, EngineRun, list_excluded_layers(net)).corrections for order in (data, data[::-1])]
    assert set(found[0]) == set(found[1]) != set()
    assert all(found[0][n].tobytes() == found[1][n].tobytes() for n in found[0])
    weights = [round_weights_adaptively(net, ranges, order, EngineRun, list_excluded_layers(net)) for order in (data, data[::-1])]
    assert set(weights[0]) == set(weights[1]) != set()
    assert all(weights[0][n].tobytes() == weights[1][n].tobytes() for n in weights[0])


def test_rounding_is_fitted_to_every_other_sample_and_judged_on_the_rest(monkeypatch):
    """The moments of each half are those of its own samples: a change of one sample changes one half."""
    halves = []
    monkeypatch.setattr("whet.precision.float8.adapt_weights", lambda layer, w, near, scales, pair, grid: halves.append(pair))
    net, data = chain(16), samples(2)
    ranges = calibrate(net, data, method="minmax")
    changed = [[data[0], {"x": data[1]["x"][..., ::-1] * 0.5}], data]
    for chosen in changed:
        monkeypatch.setattr("whet.precision.float8.select_samples", lambda *args, chosen=chosen: chosen)
        round_weights_adaptively(net, ranges, data, EngineRun, list_excluded_layers(net))
    assert len(halves) == 6, "two samples are enough"
    for one, other in zip(halves[:3], halves[3:], strict=True):
        assert np.array_equal(one[0], other[0])
        assert not np.array_equal(one[1], other[1])


def test_weight_scales_keep_every_value_and_lose_no_more_than_a_maximum_scale():
    layer = chain(64).layers[2]
    w = np.asarray(layer.inputs[1].array(), np.float32)
    scales = compute_float8_weight_scales(layer, w)
    top = np.abs(w).reshape(64, -1).max(axis=1)
    assert np.all(top / scales <= 448.01)
    plain = (top / 448).reshape(-1, 1, 1, 1)
    errors = [np.sum((q - w) ** 2) for q in (round_weights_to_float8(layer, w), round_to_e4m3(w / plain) * plain)]
    assert errors[0] < errors[1]


def test_optimized_rounding_lowers_the_layers_error_and_stays_on_the_grid():
    rng = np.random.default_rng(2)
    mixed = rng.standard_normal((400, 6)) @ rng.standard_normal((6, 48)) + 0.3 * rng.standard_normal((400, 48))
    h = mixed.T @ mixed / 400
    w = rng.standard_normal((16, 48))
    scales = np.abs(w).max(axis=1) / 448

    def grid(column, s):
        return round_to_e4m3((column / s).astype(np.float32)) * s

    near = np.stack([grid(w[:, j], scales) for j in range(48)], axis=1)
    careful = round_rows(w, scales, h, grid)
    assert compute_expected_error(w, careful, h) < 0.6 * compute_expected_error(w, near, h)
    units = (careful / scales[:, None]).astype(np.float32)
    np.testing.assert_allclose(units, round_to_e4m3(units), rtol=1e-6)


def test_adapted_weights_round_trip_through_text():
    net = chain(16)
    found = round_weights_adaptively(net, calibrate(net, samples(8), method="minmax"), samples(8), EngineRun, list_excluded_layers(net))
    assert found
    assert set(found) <= {"conv1", "conv2", "conv3"}
    packed = pack_rounding(net, found)
    back = unpack_rounding(net, packed)
    for name, w in found.items():
        np.testing.assert_allclose(back[name], w, rtol=1e-6, atol=1e-12)
    with pytest.raises((ValueError, KeyError)):
        unpack_rounding(net, {next(iter(packed)): "AAAA"})


def test_sums_of_skip_connections_stay_in_floats_if_outputs_lack_decibels():
    net, data = residual_chain(4), Calibration(samples=lambda: samples(20))
    sums = frozenset(f"sum{i}" for i in range(4))
    assert skip_sums(net, list_excluded_layers(net)) == sums
    assert skip_sums(chain(), list_excluded_layers(chain())) == frozenset()
    heard: list[str] = []
    plain = calibrate_float8_ranges(net, net, data, BuildConfig(), [], heard, enough_db=10)
    assert not plain.float_sums
    assert not heard
    wide = calibrate_float8_ranges(net, net, data, BuildConfig(), [], heard, enough_db=60)
    assert wide.float_sums == sums
    assert "sums of skip connections stay in 16 bits" in heard[0]
    made = insert_float8(net, wide)
    rounded = {t for x in made.layers if x.op == "DequantizeLinear" for t in x.outputs}
    by = {x.name: x for x in made.layers}
    assert not any(t in rounded for n in sums for t in by[n].inputs)
    assert all(x.inputs[0] in rounded for x in made.layers if x.op == "Conv" and x.name not in list_excluded_layers(net))
    fresh = samples(12, seed=9)
    want = np.stack([run_network(net, f)["y"] for f in fresh])
    db = [compute_snr(want, np.stack([run_network(insert_float8(net, r), f)["y"] for f in fresh])) for r in (plain, wide)]
    assert db[1] > db[0] + 2
    lowered, _ = lower_network(made, BuildConfig(backend="cuda"))
    assert sum(map(is_quantized, lowered.layers)) == 8, "all products of the blocks are in FP8"


def test_sums_in_floats_are_restored_from_the_cache_and_the_lock(tmp_path):
    net = residual_chain(2)
    ranges = replace(calibrate(net, samples(4), method="minmax"), float_sums=frozenset({"sum0", "sum1"}))
    write_cache(tmp_path / "cache.json", ranges)
    assert read_cache(tmp_path / "cache.json", net).float_sums == ranges.float_sums
    assert read_recipe(make_recipe(Quantization(ranges))).ranges.float_sums == ranges.float_sums


def test_the_most_sensitive_layers_leave_float8_until_outputs_have_enough_decibels():
    net, data = residual_chain(4), Calibration(samples=lambda: samples(20))
    left = list_excluded_layers(net)
    ranges = calibrate_float8_ranges(net, net, data, BuildConfig(), [])
    config = BuildConfig(timing_cache="")
    assert find_sensitive_layers(net, ranges, data, config, left, enough_db=10) == {}
    names = [x.name for x in find_quantization_sites(net, left).layers]
    judges = select_samples(samples(20), 16)
    enough = round(Analysis(net, "fp8", judges, EngineRun, ranges).snr(names) + 2)
    gone = find_sensitive_layers(net, ranges, data, config, left, enough_db=enough)
    assert gone
    assert set(gone) < set(names)
    assert all(f"{enough} dB in all" in why for why in gone.values())
    assert Analysis(net, "fp8", judges, EngineRun, ranges).snr([n for n in names if n not in gone]) >= enough
    assert find_sensitive_layers(net, ranges, Calibration(), config, left, enough_db=enough) == {}, "no samples for evaluation"


def test_excluded_layers_are_named_with_their_reasons():
    said = describe_left_out({**{f"d{i}": "one group" for i in range(6)}, "last": "nothing behind it"})
    assert said == "Not in FP8: d0, d1, d2, d3 and 2 more (one group); last (nothing behind it)."


def test_a_stored_analysis_depends_on_its_corrections_and_sums(tmp_path):
    net = residual_chain(2)
    ranges = calibrate(net, samples(4), method="minmax")
    other = replace(ranges, corrections={"conv2": np.full(16, 0.5, np.float32)})
    wide = replace(ranges, float_sums=frozenset({"sum0", "sum1"}))
    found = [Analysis(net, "fp8", samples(2), EngineRun, r, tmp_path / "memory.json").snr() for r in (ranges, other, wide, ranges)]
    assert found[0] == found[3]
    assert len(set(found)) == 3


def test_a_network_in_float8_has_float8_layers_for_hopper_and_none_on_the_cpu():
    net = chain(64)
    made = insert_float8(net, calibrate(net, samples(4), method="minmax"))
    lowered, _ = lower_network(made, BuildConfig(backend="cuda"))
    eight = [x for x in lowered.layers if is_quantized(x)]
    assert len(eight) == 3
    assert [x.outputs[0].dtype for x in eight[:2]] == [F8E4M3, F8E4M3]
    lowered, log = lower_network(made, BuildConfig(backend="cpu"))
    assert not any(is_quantized(x) for x in lowered.layers)
    assert any("no kernel of cpu computes this layer in FP8" in reason for reason in log.skipped.values())


def test_a_model_with_float8_q_and_dq_has_float8_layers(tmp_path):
    net = chain(64)
    path = save_onnx(insert_float8(net, calibrate(net, samples(4), method="minmax")), tmp_path / "float8.onnx")
    lowered, _ = lower_network(network_from_onnx(str(path)), BuildConfig(backend="cuda"))
    assert [x.name for x in lowered.layers if is_quantized(x)] == ["conv1 + relu1", "conv2 + relu2", "conv3 + relu3"]
    f = samples(1, seed=4)[0]
    want, got = run_network(net, f)["y"], run_network(lowered, f)["y"]
    assert 25 < compute_snr(want, got) < 90


def test_the_cpu_reports_that_it_has_no_fast_float8():
    config = BuildConfig(precisions=("fp8",), timing_cache="", optimization_level=1)
    plan = build_float8(chain(64), config, Calibration(samples=lambda: samples(4)))
    assert any("no FP8 kernels" in n for n in plan.report.notes)
    with pytest.raises(BuildError, match=r"precisions=\('fp8',\) cannot be used: this backend has no FP8 kernels"):
        build_float8(chain(64), replace(config, strict=True), Calibration(samples=lambda: samples(4)))
    made = insert_float8(prepare(chain(64), config), calibrate(chain(64), samples(4), method="minmax"))
    explicit = build(made, config)
    assert "no tactic of this backend computes in FP8" in explicit.report.precisions["fp8"].reason


def test_a_lock_of_float8_gives_the_same_network(tmp_path):
    config = BuildConfig(backend="null", precisions=("fp8",), timing_cache="", optimization_level=0)
    plan = build_float8(chain(16), config, Calibration(samples=lambda: samples(40), steps=("round",)))
    assert plan.report.quantized.kind == "fp8"
    assert any("rounded against" in n for n in plan.report.info)
    assert set(plan.report.quantized.float_layers) == {"conv0", "gemm"}


@pytest.mark.data
def test_resnet8_keeps_its_accuracy():
    model = next(iter(realdata.models(["resnet8_mlperftiny"])))
    net = network_from_onnx(str(model.path))
    net.outputs = [net.outputs[0].maker.inputs[0]]
    net.prune_dead()
    made = prepare(net, BuildConfig())
    x, _ = datasets.cifar10_train_lossless()
    images = x[datasets.spread(len(x), 96)].astype(np.float32).transpose(0, 3, 1, 2)
    name = net.inputs[0].name
    ranges = calibrate_float8_ranges(net, made, Calibration(samples=lambda: ({name: images[i : i + 1]} for i in range(64))), BuildConfig(), [])
    exact, low = (EngineRun(n, [made.outputs[0].name]) for n in (made, insert_float8(made, ranges)))
    a, b = (r({name: images[64:]})[made.outputs[0].name] for r in (exact, low))
    assert compute_snr(a, b) > 27  # 16 without the recipe
    assert len(find_quantization_sites(made).layers) - len(list_excluded_layers(made)) == 8
