"""Budgets of accuracy: their forms, the sensitivity of layers, and builds that stay within a budget and report its cost."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent))
from test_calibration import samples, small_network

from support.snr import compute_snr
from whet.builder.config import BuildConfig
from whet.builder.precision.accuracy_budget import Judge
from whet.builder.precision.float16 import build_floats_within
from whet.builder.precision.int8 import Calibration, build_int8, prepare
from whet.builder.verify.engine_values import EngineRun
from whet.engine.schema import encode
from whet.errors import CalibrationError, UsageError
from whet.network import Network, parse_type
from whet.ops import run_network
from whet.precision import Analysis, Budget, calibrate, emulate_network, find_quantization_sites
from whet.precision.measures import EXACT_DB, compute_cosine, compute_output_snr, to_decibels
from whet.tactics import is_quantized, load_tactics

QUICK = {"timing_cache": "", "threads": 1, "avg_timing": 1, "optimization_level": 1, "whole_engines": 1, "verify": False}
SHAPE = {"x": (1, 3, 12, 12)}
load_tactics("cpu")


def spiky_network():
    """Three convolutions in a row. The second one's input has one channel 24 times as large as the others, which 8 bits cannot represent."""
    rng = np.random.default_rng(5)
    net = Network("spiky")

    def w(*shape):
        return (rng.standard_normal(shape) / np.sqrt(np.prod(shape[1:]))).astype(np.float32)

    first = w(16, 3, 3, 3)
    first[0] *= 24
    second = w(16, 16, 3, 3)
    second[:, 0] /= 24
    x = net.add_input("x", parse_type("f32[N,3,12,12]"))
    a = net.add("Conv", x, net.constant(first, "w"), pads=(1,) * 4, name="a")
    b = net.add("Conv", a, net.constant(second, "w"), pads=(1,) * 4, name="b")
    net.mark_output(net.add("Conv", net.add("Relu", b, name="r"), net.constant(w(8, 16, 1, 1), "w"), name="c"), "y")
    return net


def analysis(net=None, precision="int8", **more):
    net = net or spiky_network()
    ranges = calibrate(net, samples(4), run=EngineRun(net, find_quantization_sites(net).names()), method="minmax")
    return Analysis(net, precision, samples(6, 9), EngineRun, ranges, **more)


def test_decibels():
    a = np.array([3.0, 4.0], np.float32)
    assert compute_snr(a, a) == EXACT_DB
    assert compute_snr(a, a * np.float32(1.1)) == pytest.approx(20, abs=1e-4)
    assert to_decibels(0, 1) == -EXACT_DB
    assert compute_snr(a, np.array([np.nan, 4], np.float32)) == -EXACT_DB
    assert compute_cosine(a, -a) == pytest.approx(-1)
    assert compute_cosine(a, np.array([4, -3], np.float32)) == pytest.approx(0)
    assert compute_output_snr([{"a": a, "n": np.array([1])}], [{"a": a, "n": np.array([2])}]) == EXACT_DB  # integers have no signal power


@pytest.mark.parametrize("precision", ["int8", "fp8", "fp16", "bf16"])
def test_emulation_only_rounds(precision):
    """With no layer selected the values are FP32's; with all, their error is that of the rounding."""
    a = analysis(small_network(), precision)
    assert a.snr([]) == EXACT_DB
    low, high = {"int8": (25, 60), "fp8": (15, 40), "fp16": (55, 90), "bf16": (35, 65)}[precision]
    assert low < a.snr() < high
    net = emulate_network(small_network(), precision, a.ranges)
    assert [t.name for t in net.outputs] == ["y"]
    want, got = run_network(net, samples(1)[0])["y"], EngineRun(net, ["y"])(samples(1)[0])["y"]
    assert compute_snr(want, got) > a.snr() + 10  # the engine rounds as the reference does, up to ties


def test_bf16_weights_and_values_are_bf16():
    net = emulate_network(small_network(), "bf16")
    seen = {}
    run_network(net, samples(1)[0], watch=lambda t, v: seen.setdefault(t.name, v))
    bits = seen["y"].view(np.uint32)
    assert not np.any(bits & 0xFFFF)
    w = next(x for x in net.layers if x.op == "Conv").inputs[1].array()
    assert not np.any(w.view(np.uint32) & 0xFFFF)


def test_the_sensitive_layer_is_found():
    a = analysis()
    rows = a.rank_layers()
    a.set_cumulative_snr(rows)
    assert rows[0].layer == "b"
    assert rows[0].alone_db < rows[1].alone_db - 10
    assert rows[0].from_here_db == a.snr()
    assert rows[1].from_here_db > rows[0].from_here_db + 10  # without it the rest is accurate
    per_tensor = a.tensors()
    assert per_tensor["a"] > per_tensor["b"] + 5
    assert per_tensor["y"] == pytest.approx(a.snr(), abs=1e-6)


def test_measured_sensitivities_are_reused(tmp_path):
    file = tmp_path / "deep" / "harm.json"
    first = analysis(file=file)
    rows = first.rank_layers()
    again = analysis(file=file)
    again.run_of = None  # no further run is permitted
    assert again.rank_layers() == rows
    other = analysis(small_network(), file=file)
    assert other.snr() != first.snr()  # a file of another network is not used
    file.write_text("{")
    assert analysis(file=file).snr(["b"]) == first.snr(["b"])


def test_forms_of_a_budget(tmp_path, monkeypatch):
    (tmp_path / "whet_eval_of_mine.py").write_text("def top1(run):\n    return 90.0\nnumber = 3\n")
    monkeypatch.chdir(tmp_path)
    assert Budget.parse("snr:30").limit == 30
    made = Budget.parse("python:whet_eval_of_mine:top1:0.5")
    assert (made.kind, made.limit, made.text) == ("metric", 0.5, "whet_eval_of_mine:top1 may fall by 0.5")
    for bad, words in {
        "snr": "not a number", "snr:loud": "not a number", "psnr:3": "none of", "python:a:b": "not a number", "cosine:7": "cannot be 7",
        "python:whet_eval_of_mine:top1:-1": "cannot be -1", "python:whet_eval_of_mine:top5:1": "top5",
        "python:whet_eval_of_mine:number:1": "is not a function", "python:no_such_module:f:1": "no_such_module",
    }.items():  # fmt: skip
        with pytest.raises(UsageError, match=words):
            Budget.parse(bad)


def test_a_nan_metric_is_refused():
    with pytest.raises(CalibrationError, match="a finite number is needed"):
        Budget("metric", 1.0, lambda run: float("nan"), "mine").judge(dict, dict, [])
    with pytest.raises(CalibrationError, match="which is not a number"):
        Budget("metric", 1.0, lambda run: "good", "mine").judge(dict, dict, [])


def config(**more):
    return BuildConfig(profiles=((SHAPE, SHAPE, SHAPE),), **{"precisions": ("int8",), **QUICK, **more})


def build_within(budget, net=None, **more):
    return build_int8(net or spiky_network(), config(**more), Calibration(samples=lambda: samples(6), method="minmax"), budget=budget)


@pytest.mark.parametrize("level", [0, 1])
def test_only_sensitive_layers_leave_int8(level):
    plan = build_within(Budget("snr", 28.0), optimization_level=level)
    found = plan.report.accuracy
    assert found.holds
    assert found.value >= 28
    if level == 0:  # nothing is timed, so only the budget decides
        assert set(found.float_layers) == {"b"}
        assert "alone it leaves" in found.float_layers["b"]
        names = {p for x in plan.network.layers if is_quantized(x) for p in x.name.split(" + ")}
        assert "b" not in names
    assert any(n.startswith("Accuracy: output SNR at least 28 dB") for n in plan.report.info)


def test_an_unreachable_budget_gives_floating_point():
    plan = build_within(Budget("snr", 150.0))
    assert not any(is_quantized(x) for x in plan.network.layers)
    assert all(e.kept == (e.what == "floating point") for e in plan.report.precision_choice)
    assert any("(outside the budget)" in n for n in plan.report.notes)


def test_a_loose_budget_drops_nothing():
    found = build_within(Budget("cosine", 0.2), optimization_level=0).report.accuracy
    assert found.float_layers == {}
    assert found.value > 0.2


def test_the_users_own_metric_decides():
    """Share of the user's samples for which the largest of 8 channels is the same as in FP32."""
    net, data = spiky_network(), samples(8, 21)
    truth = [run_network(net, f)["y"].argmax(1) for f in data]
    calls = []

    def same(run):
        calls.append(1)
        return 100 * float(np.mean([(run(f)["y"].argmax(1) == t).mean() for f, t in zip(data, truth, strict=True)]))

    loose = build_within(Budget("metric", 60.0, same, "same"), optimization_level=0).report.accuracy
    assert loose.float_layers == {}
    tight = build_within(Budget("metric", 3.0, same, "same"), optimization_level=0).report.accuracy
    assert set(tight.float_layers) == {"b"}
    assert tight.fp32 > 99.9
    assert tight.value >= tight.fp32 - 3
    assert len(calls) > 4


def test_16_bit_floats_within_a_budget():
    net = small_network()
    made = prepare(net, config())
    quick = config(precisions=("bf16",), precision_constraints="none")
    plan, verdict = build_floats_within(net, made, quick, Budget("snr", 60.0), samples(4))
    found = plan.report.accuracy
    if verdict is None:  # no BF16 kernel was faster on this machine
        assert "FP32" in found.judged_on
    else:
        assert verdict.holds
        assert verdict.value >= 60
    assert json.dumps(encode(found))


def test_a_judge_of_another_precision_uses_the_known_outputs():
    made, data = prepare(small_network(), config()), samples(3)
    ranges = calibrate(made, data, run=EngineRun(made, find_quantization_sites(made).names()), method="minmax")
    first = Judge(made, "int8", ranges, data, Budget("snr", 30.0), config())
    second = Judge(made, "bf16", None, data, Budget("snr", 30.0), config(), known=first)
    assert second.analysis.wants is first.analysis.wants
    alone = Judge(made, "bf16", None, data, Budget("snr", 30.0), config())
    assert second.names == alone.names
    assert second.low(second.names).value == pytest.approx(alone.low(alone.names).value, abs=1e-6)
    assert first.low(first.names).value != second.low(second.names).value
