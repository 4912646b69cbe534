"""Scaling and bias correction: the network's function is preserved, a kept step lowers the error, and steps without gain are dropped."""

import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1]))
from test_budget import spiky_network
from test_calibration import samples, small_network

from support import datasets, realdata
from support.snr import compute_snr
from whet.builder.config import BuildConfig
from whet.builder.precision.calibration import Calibration, get_calibrated_ranges, prepare
from whet.builder.verify.engine_values import EngineRun
from whet.errors import CalibrationError, UsageError
from whet.frontends import network_from_onnx
from whet.network import Network, parse_type
from whet.ops import run_network
from whet.precision import Analysis, calibrate, find_quantization_sites, quantize, read_cache, select_samples, write_cache
from whet.precision.scaling import apply_scalings, find_sites
from whet.precision.steps import find_corrections, find_scalings
from whet.tactics import load_tactics

load_tactics("cpu")


def mobile_network(limit=6.0):
    """A MobileNetV2 block: expansion, ReLU6, depthwise, ReLU6, projection; channels of very different magnitudes, as after folding batch norms."""
    rng = np.random.default_rng(7)
    net = Network("mobile")

    def w(*shape):
        return (rng.standard_normal(shape) / np.sqrt(np.prod(shape[1:]))).astype(np.float32)

    sizes = np.exp(rng.uniform(-3, 0.3, 24)).astype(np.float32)
    low, high = net.constant(np.float32(0), "low"), net.constant(np.float32(limit), "high")
    x = net.add_input("x", parse_type("f32[1,3,12,12]"))
    a = net.add("Conv", x, net.constant(w(24, 3, 1, 1) * sizes[:, None, None, None], "w1"), net.constant(sizes * 0.3, "b1"), name="expand")
    a = net.add("Clip", a, low, high, name="six")
    d = net.add("Conv", a, net.constant(w(24, 1, 3, 3) / sizes[:, None, None, None], "w2"), pads=(1,) * 4, group=24, name="depthwise")
    d = net.add("Clip", d, low, high, name="six_2")
    net.mark_output(net.add("Conv", d, net.constant(w(8, 24, 1, 1), "w3"), name="project"), "y")
    return net


def vit_block():
    """LayerNorm with a scale of 30 in two channels, two products that read it, a Relu, and the product back."""
    rng = np.random.default_rng(8)
    net = Network("vit")

    def w(*shape):
        return (rng.standard_normal(shape) / np.sqrt(shape[0])).astype(np.float32)

    g = np.ones(32, np.float32)
    g[:2] = 30
    first = w(32, 48)
    first[:2] /= 30
    x = net.add_input("x", parse_type("f32[1,10,32]"))
    n = net.add("LayerNormalization", x, net.constant(g, "g"), net.constant(np.zeros(32, np.float32), "b"), name="norm")
    h = net.add("Relu", net.add("Add", net.add("MatMul", n, net.constant(first, "w1"), name="up"), net.constant(w(1, 48)[0], "b1")), name="act")
    net.mark_output(net.add("MatMul", h, net.constant(w(48, 32), "w2"), name="down"), "y")
    return net


def feeds(net, n=8, seed=4):
    rng = np.random.default_rng(seed)
    return [{t.name: rng.standard_normal([d if isinstance(d, int) else 1 for d in t.shape]).astype(np.float32) for t in net.inputs} for _ in range(n)]


def int8_snr(net, steps, data, test):
    ranges = get_calibrated_ranges(net, net, Calibration(samples=lambda: iter(data), method="minmax", steps=steps), BuildConfig(), lambda _: None)
    return Analysis(net, "int8", test, EngineRun, ranges).snr(), ranges


@pytest.mark.parametrize("make", [mobile_network, vit_block])
def test_scaling_preserves_the_function_and_lowers_the_error(make):
    net = make()
    data, test = feeds(net), feeds(net, 8, 99)
    scalings, report = find_scalings(net, data, data, EngineRun, ("equalize", "smooth"))
    assert scalings
    assert all(after <= 0.9 * before for _, _, before, after, kept in report.tried if kept)
    scaled = apply_scalings(net, scalings)
    for f in data:
        assert compute_snr(run_network(net, f)["y"], run_network(scaled, f)["y"]) > 100
    assert str(net) == str(make())  # the source network is unchanged
    plain, _ = int8_snr(net, (), data, test)
    better, ranges = int8_snr(net, ("equalize", "smooth"), data, test)
    assert ranges.scalings
    assert better > plain + 3


def test_channels_clipped_by_relu6_are_not_scaled():
    """ReLU6 clips the same values as before: on calibration data the result is equal up to rounding."""
    net = mobile_network(limit=0.5)
    data = feeds(net)
    scalings, _ = find_scalings(net, data, data, EngineRun, ("smooth",))
    run = EngineRun(net, ["six"])
    top = np.max([np.abs(run(f)["six"]).max(axis=(0, 2, 3)) for f in data], axis=0)
    cut = top >= 0.5
    assert cut.any()
    assert not cut.all()
    if "six" in scalings:
        assert np.all(scalings["six"][cut] == 1)
    scaled = apply_scalings(net, scalings)
    assert all(compute_snr(run_network(net, f)["y"], run_network(scaled, f)["y"]) > 100 for f in data)


def test_the_reason_is_given_if_scale_cannot_move():
    found, refused = find_sites(small_network())
    assert "x" in refused  # no earlier layer can absorb the division
    assert "input of the network" in refused["x"]
    assert any("cannot take the scale" in r for r in refused.values())  # the residual reads it too
    assert "a" not in found


def test_steps_without_gain_are_dropped():
    """Channels of equal magnitude: nothing to equalize."""
    rng = np.random.default_rng(0)
    net = Network("even")
    x = net.add_input("x", parse_type("f32[1,8,8,8]"))
    w = np.sign(rng.standard_normal((8, 8, 1, 1))).astype(np.float32)
    a = net.add("Relu", net.add("Conv", x, net.constant(w, "w1")), name="a")
    net.mark_output(net.add("Conv", a, net.constant(w, "w2")), "y")
    scalings, report = find_scalings(net, feeds(net), feeds(net), EngineRun, ("equalize",))
    assert scalings == {}
    assert [t[4] for t in report.tried] == [False]


def shifted_network():
    """A convolution after a Relu whose weights all round up."""
    net = Network("shifted")
    a = net.add("Relu", net.add_input("x", parse_type("f32[1,4,10,10]")), name="a")
    w = np.full((6, 4, 3, 3), 0.304, np.float32)  # with 1 as the largest: 38.6 steps, rounded to 39
    w[:, 0, 0, 0] = 1
    net.mark_output(net.add("Conv", a, net.constant(w, "w"), name="c"), "y")
    return net


def test_bias_correction_removes_the_mean_error():
    """Weights that all round up shift the mean of a layer after a Relu; the correction removes the shift, and is kept only for that."""
    net, rng = shifted_network(), np.random.default_rng(2)
    data = [{"x": rng.standard_normal((1, 4, 10, 10)).astype(np.float32)} for _ in range(8)]
    ranges = calibrate(net, data, method="minmax")
    corrections, report = find_corrections(net, ranges, data, EngineRun)
    assert [t[4] for t in report.tried] == [True]
    test = [{"x": rng.standard_normal((1, 4, 10, 10)).astype(np.float32)} for _ in range(8)]
    before = Analysis(net, "int8", test, EngineRun, ranges).snr()
    ranges.corrections = corrections
    made = quantize(net, ranges)
    assert next(t for t in made.constants.values() if "correct" in t.name).shape == (6,)
    assert Analysis(net, "int8", test, EngineRun, ranges).snr() > before + 3
    skipped = quantize(net, ranges, skip=["c"])  # a layer in floating point is not corrected
    assert not any("correct" in n for n in skipped.constants)


def test_steps_are_stored_in_the_cache(tmp_path):
    net = mobile_network()
    data = feeds(net)
    made = prepare(net, BuildConfig())
    notes = []
    calibration = Calibration(samples=lambda: iter(data), cache=str(tmp_path / "c.json"), method="minmax", steps=("equalize", "smooth", "bias"))
    tried = []
    first = get_calibrated_ranges(net, made, calibration, BuildConfig(), pytest.fail, tried, notes.append)
    assert "kept: scaling" in notes[-1]
    assert any(r.kept for r in tried)
    ends = [r for r in tried if r.at == "outputs"]  # one option is kept: the one that the note names
    assert [r.step for r in ends if r.kept] == [notes[-1].rpartition("kept: ")[2].rstrip(".")]
    assert len(ends) > 1
    again = read_cache(tmp_path / "c.json", made)
    assert set(again.scalings) == set(first.scalings)
    for name, s in first.scalings.items():
        assert np.array_equal(again.scalings[name], s)
    assert str(quantize(made, again)) == str(quantize(made, first))
    with pytest.raises(UsageError, match="cannot hold equalized scales"):
        write_cache(tmp_path / "c.cache", first)
    text = (tmp_path / "c.json").read_text()
    digits = np.ascontiguousarray(first.scalings["six"], "<f4").tobytes().hex()
    assert digits in text
    (tmp_path / "bad.json").write_text(text.replace(digits, "0000c07f" + digits[8:]))  # with a NaN
    with pytest.raises(CalibrationError):
        read_cache(tmp_path / "bad.json", made)


@pytest.mark.parametrize("steps", [("equalize", "smooth"), ("bias",)])
def test_the_order_of_samples_changes_no_step(steps, tmp_path):
    """40 samples: 16 serve for evaluation and 16 others for the steps, independent of order; the caches are identical bytes."""
    net = mobile_network() if "bias" not in steps else shifted_network()
    data, made, written = feeds(net, 40), prepare(net, BuildConfig()), []
    for k, order in enumerate((data, data[::-1])):
        cache = tmp_path / f"{k}.json"
        calibration = Calibration(samples=lambda order=order: iter(order), cache=str(cache), method="minmax", steps=steps)
        found = get_calibrated_ranges(net, made, calibration, BuildConfig(), pytest.fail)
        assert found.scalings or found.corrections
        written.append(cache.read_bytes())
    assert written[0] == written[1]


@pytest.mark.slow
@pytest.mark.skipif(datasets.root() is None, reason="no shared data folder")
def test_steps_never_lose_accuracy_on_a_real_vit():
    """Six blocks trained on MNIST: with the steps, INT8 is at least as accurate against FP32 on other images as without."""
    (model,) = realdata.models(["vit_mnist"])
    net = network_from_onnx(str(model.path))
    made = prepare(net, BuildConfig())
    images = list(model.inputs(14))
    snrs = []
    for steps in ((), ("smooth",)):
        calibration = Calibration(samples=lambda: iter(images[:8]), method="minmax", steps=steps)
        ranges = get_calibrated_ranges(net, made, calibration, BuildConfig(), lambda _: None)
        snrs.append(Analysis(made, "int8", images[8:], EngineRun, ranges).snr())
    assert snrs[0] > 30
    assert snrs[1] > snrs[0] - 1


def test_samples_are_selected_by_content_not_by_order():
    data = samples(9)
    one, other = select_samples(data, 3), select_samples(data[::-1], 3)
    assert all(np.array_equal(a["x"], b["x"]) for a, b in zip(one, other, strict=True))
    assert find_quantization_sites(spiky_network()).layers
