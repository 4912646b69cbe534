"""INT8 on a GPU from the command line: calibrated on the CPU, selected by time, user's constraints respected; on a simulated GPU if there is none."""

import json

import numpy as np
import pytest
from click.testing import CliRunner

pytest.importorskip("cuda.bindings", reason="the cuda extra is not installed")
from whet.backends.cuda import driver
from whet.builder import BuildConfig
from whet.builder.precision.int8 import Calibration, build_int8, get_calibrated_ranges, prepare
from whet.cli.exec import command
from whet.engine import read_engine
from whet.frontends import network_from_onnx
from whet.frontends.onnx_writer import save_onnx
from whet.network import Network, parse_type
from whet.ops import run_network
from whet.precision import quantize
from whet.runtime import Runtime
from whet.tactics import is_quantized

QUICK = ["--backend=cuda", "--noBuilderCache", "--avgTiming=1", "--duration=0", "--iterations=1", "--warmUp=0"]
RUNS = pytest.mark.skipif(driver.why_unavailable() is not None, reason=str(driver.why_unavailable()))


def residual(batch="N"):
    """Convolutions of 32 channels with a residual, then pooling: every layer has a quantized form on tensor cores."""
    rng = np.random.default_rng(1)
    net = Network("small")

    def w(*shape):
        return net.constant((rng.standard_normal(shape) / np.sqrt(np.prod(shape[1:]))).astype(np.float32), "w")

    def conv(x, filters, name, **attrs):
        return net.add_layer("Conv", [x, filters, None], attrs, name=name).output

    x = net.add_input("x", parse_type(f"f32[{batch},3,16,16]"))
    a = net.add("Relu", conv(x, w(32, 3, 3, 3), "first", pads=(1,) * 4))
    b = net.add("Relu", conv(a, w(32, 32, 3, 3), "second", pads=(1,) * 4))
    c = net.add("Relu", net.add("Add", conv(b, w(32, 32, 3, 3), "third", pads=(1,) * 4), a))
    for i in range(4):
        c = net.add("Relu", conv(c, w(32, 32, 3, 3), f"tail{i}", pads=(1,) * 4))
    net.mark_output(net.add("Gemm", net.add("Flatten", net.add("GlobalAveragePool", c)), w(32, 8)), "y")
    return net


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """The network as ONNX, and data for it."""
    folder = tmp_path_factory.mktemp("int8")
    save_onnx(residual(2), folder / "m.onnx")
    x = np.random.default_rng(2).standard_normal((8, 3, 16, 16)).astype(np.float32)
    np.savez(folder / "data.npz", x=x)
    net = network_from_onnx(str(folder / "m.onnx"))
    samples = Calibration(samples=lambda: ({"x": x[i : i + 2]} for i in (0, 2)), cache=str(folder / "known.json"), method="minmax")
    get_calibrated_ranges(net, prepare(net, BuildConfig()), samples, BuildConfig(), print)
    return folder


def run(folder, *flags, quick=(*QUICK, "--noVerify", "--buildOnly")):
    got = CliRunner().invoke(command, [f"--onnx={folder}/m.onnx", f"--saveEngine={folder}/e.engine", *flags, *quick])
    return got.exit_code, got.output, read_engine(folder / "e.engine") if got.exit_code == 0 else None


def quantized(plan):
    return {x.name for x in plan.network.layers if is_quantized(x)}


def test_calibrates_on_the_cpu_and_chooses_on_the_gpu(model, standin_gpu):
    code, out, plan = run(model, "--fp16", "--int8", "--calibMethod=minmax", f"--calibData={model}/data.npz", f"--calib={model}/c.json")
    assert code == 0, out
    assert "INT8 pays: floating point" in out
    assert "INVENTED" not in out
    assert "permitted but used by 0" not in out, "no warning about FP16 if INT8 covers all layers"
    assert plan.backend == "cuda"
    assert all(plan.choices[n].tactic.startswith("cuda/q") for n in quantized(plan))
    assert len(quantized(plan)) > 6
    data = json.loads((model / "c.json").read_text())
    assert data["samples"] == 4  # two samples each: the model's batch
    again = run(model, "--fp16", "--int8", f"--calib={model}/c.json")[2]
    assert quantized(again) == quantized(plan)
    assert [again.choices[n].implementation for n in sorted(quantized(again))] == [plan.choices[n].implementation for n in sorted(quantized(plan))]


def test_the_ranges_do_not_depend_on_the_target(model, standin_gpu):
    assert run(model, "--int8", "--calibMethod=minmax", f"--calibData={model}/data.npz", f"--calib={model}/gpu.json")[0] == 0
    cpu = ["--backend=cpu", "--noBuilderCache", "--builderOptimizationLevel=0", "--noVerify", "--buildOnly"]
    assert run(model, "--int8", "--calibMethod=minmax", f"--calibData={model}/data.npz", f"--calib={model}/cpu.json", quick=cpu)[0] == 0
    assert (model / "gpu.json").read_bytes() == (model / "cpu.json").read_bytes()


def test_fp16_is_kept_and_reported_if_int8_is_slower(model, standin_gpu):
    standin_gpu[""] = 9.0
    code, out, plan = run(model, "--fp16", "--int8", f"--calib={model}/known.json")
    assert code == 0, out
    assert "INT8 is permitted but does not pay" in out or "--int8 is permitted but does not pay here" in out
    assert not quantized(plan)
    assert any(d == "f16" for c in plan.choices.values() for _, d in c.outputs)


def test_a_layer_without_gain_leaves_int8(model, standin_gpu):
    standin_gpu["third"] = 50.0
    code, out, plan = run(model, "--fp16", "--int8", f"--calib={model}/known.json")
    assert code == 0, out
    assert "quantizable layers stay in floating point" in out, out[-1500:]
    names = " ".join(quantized(plan))
    assert "second" in names
    assert "third" not in names


def test_best_uses_int8_only_with_calibration_data(model, standin_gpu):
    assert quantized(run(model, "--best", f"--calib={model}/known.json")[2])
    code, out, plan = run(model, "--best")
    assert code == 0, out
    assert "--best leaves INT8 out" in out
    assert not quantized(plan)


def test_precision_constraints_are_respected(model, standin_gpu):
    obey = ["--fp16", "--int8", f"--calib={model}/known.json", "--precisionConstraints=obey"]
    code, out, plan = run(model, *obey, "--layerPrecisions=second:fp16")
    assert code == 0, out
    assert quantized(plan)
    assert not any("second" in n for n in quantized(plan))
    standin_gpu[""] = 9.0  # INT8 is slower now, but demanded
    code, out, plan = run(model, *obey, "--layerPrecisions=second:int8")
    assert code == 0, out
    assert len(quantized(plan)) == 1
    assert "second" in next(iter(quantized(plan)))
    standin_gpu.clear()
    code, out, plan = run(model, *obey, "--layerOutputTypes=second:fp32")
    assert code == 0, out
    (second,) = (x for x in plan.network.layers if "second" in x.name and x.op != "Reformat" and x.composite == "Conv")
    assert second.outputs[0].dtype.is_float
    assert plan.choices[second.name].outputs[0][1] == "f32"


def test_a_model_with_q_and_dq_keeps_its_quantization(model, standin_gpu, tmp_path):
    net = network_from_onnx(str(model / "m.onnx"))
    made = prepare(net, BuildConfig())
    with np.load(model / "data.npz") as f:
        x = f["x"][:2]
    ranges = get_calibrated_ranges(net, made, Calibration(samples=lambda: [{"x": x}], method="minmax"), BuildConfig(), print)
    save_onnx(quantize(made, ranges), tmp_path / "m.onnx")
    code, out, plan = run(tmp_path, "--fp16", "--int8", f"--calib={model}/c.json")
    assert code == 0, out
    assert "--calib is not used: the model has Q/DQ nodes" in out
    assert len(quantized(plan)) > 6


@pytest.mark.parametrize("least", [20.0, 60.0])
def test_a_budget_on_the_gpu_is_judged_by_emulation_without_engine_outputs(model, standin_gpu, least, monkeypatch):
    """The simulated GPU's outputs are zeros; sets of layers are judged by emulation, and sensitive layers leave INT8."""
    from whet.builder.precision.accuracy_budget import Judge

    monkeypatch.setattr(Judge, "engine", lambda *_: None)
    code, out, plan = run(model, "--fp16", "--int8", f"--calibData={model}/data.npz", f"--calib={model}/known.json", f"--accuracy=snr:{least}")
    assert code == 0, out
    report = plan.report.accuracy
    assert report.holds
    assert bool(report.float_layers) == (least > 50)


@pytest.mark.gpu
@RUNS
@pytest.mark.parametrize("batch", [1, 8])
def test_calibrated_engines_of_a_gpu_are_verified_and_near_fp32(batch):
    """End to end on a real GPU, at the built batch: every layer against the reference of the same integers."""
    net = residual()
    rng = np.random.default_rng(3)
    feeds = [{"x": rng.standard_normal((1, 3, 16, 16)).astype(np.float32)} for _ in range(8)]
    shape = {"x": (batch, 3, 16, 16)}
    config = BuildConfig(
        backend="cuda", precisions=("fp16", "int8"), profiles=((shape, shape, shape),), timing_cache="", layer_precisions=(("*", "int8"),),
        precision_constraints="prefer",
    )  # fmt: skip
    plan = build_int8(net, config, Calibration(samples=lambda: iter(feeds)))
    assert len(quantized(plan)) > 6
    assert not plan.report.verification.failures
    assert plan.report.verification.layers == len(plan.network.layers)
    x = np.concatenate([feeds[i % 8]["x"] for i in range(batch)])
    want = run_network(net, {"x": x})["y"].astype(np.float64)
    got = Runtime("cuda").load(plan).create_context().run({"x": x})["y"]
    assert 10 * np.log10(np.sum(want**2) / np.sum((got - want) ** 2)) > 25


@pytest.mark.gpu
@RUNS
def test_the_command_line_calibrates_builds_and_runs_on_a_gpu(model):
    code, out, plan = run(
        model, "--fp16", "--int8", f"--calibData={model}/data.npz", "--accuracy=snr:20", "--precisionConstraints=obey",
        "--layerPrecisions=second:int8", quick=QUICK,
    )  # fmt: skip
    assert code == 0, out
    assert any("second" in n for n in quantized(plan))
    assert plan.report.accuracy.holds
    assert plan.report.verification.failures == []
    assert "PASSED" in out
