"""`whet run`: every value against ONNX Runtime and the reference; the first difference is named; the exit code reflects it."""

import json

import numpy as np
import pytest
from click.testing import CliRunner

from whet.cli.run import command
from whet.errors import UsageError
from whet.frontends.onnx_writer import save_onnx
from whet.network import Network, parse_type

pytest.importorskip("onnxruntime")


def network(broken=False):
    """Two convolutions and a classifier; in `broken` one weight of the second convolution is changed."""
    rng = np.random.default_rng(3)
    net = Network("two")

    def w(*shape):
        return (rng.standard_normal(shape) / np.sqrt(np.prod(shape[1:]))).astype(np.float32)

    x = net.add_input("x", parse_type("f32[N,3,8,8]"))
    a = net.add("Relu", net.add("Conv", x, net.constant(w(8, 3, 3, 3), "w1"), name="conv1"), name="relu1")
    second = w(8, 8, 3, 3)
    if broken:
        second[0, 0, 0, 0] += 1
    b = net.add("Relu", net.add("Conv", a, net.constant(second, "w2"), name="conv2"), name="relu2")
    net.mark_output(net.add("Gemm", net.add("Flatten", net.add("GlobalAveragePool", b)), net.constant(w(8, 5), "w3"), name="fc"), "y")
    return net


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("run")
    save_onnx(network(), made / "a.onnx")
    save_onnx(network(broken=True), made / "b.onnx")
    np.save(made / "x.npy", np.random.default_rng(1).standard_normal((4, 3, 8, 8)).astype(np.float32))
    return made


def run(*args):
    got = CliRunner().invoke(command, [str(a) for a in args])
    return got.exit_code, got.output


@pytest.mark.parametrize("against", ["onnxruntime", "reference"])
def test_every_value_of_the_model_matches(folder, against):
    code, out = run(folder / "a.onnx", "--against", against, "--json")
    data = json.loads(out)
    assert code == 0, out
    assert data["matches"]
    assert data["first_difference"] is None
    assert {"conv1", "relu1", "conv2", "relu2", "y"} <= {r["tensor"] for r in data["values"]}
    assert not data["not_compared"]
    assert all(r["max_error"] < 1e-5 for r in data["values"])


def test_the_first_difference_is_named(folder):
    code, out = run(folder / "a.onnx", folder / "b.onnx", "--against", "onnxruntime", "--json")
    data = json.loads(out)
    assert code == 1
    assert (data["first_difference"], data["first_layer"]) == ("conv2", "conv2")
    rows = {r["tensor"]: r for r in data["values"]}
    assert not rows["relu1"]["differs"]
    assert rows["conv2"]["enters"]
    assert not rows["y"]["enters"]
    code, out = run(folder / "a.onnx", folder / "b.onnx", "--against", "whet")
    assert code == 1
    assert "The first difference: %conv2, computed by Conv 'conv2'" in out
    assert "MISMATCH" in out


def test_a_tolerance_and_data(folder):
    pair = (folder / "a.onnx", folder / "b.onnx", "--against", "onnxruntime", "--inputs", folder / "x.npy", "--samples", 4)
    assert run(*pair)[0] == 1
    assert run(*pair, "--tolerance", 10)[0] == 0


def test_a_fused_engine_compares_the_remaining_values(folder):
    code, out = run(folder / "a.onnx", "--fused", "--json", "--shapes", "x:2x3x8x8")
    data = json.loads(out)
    assert code == 0, out
    assert "conv1" in data["not_compared"]  # its Relu was fused into it
    assert "relu1" in {r["tensor"] for r in data["values"]}


def test_a_saved_int8_engine_against_its_model(folder):
    from whet.builder.config import BuildConfig
    from whet.builder.precision.int8 import Calibration, build_int8
    from whet.engine import write_engine

    shape = {"x": (1, 3, 8, 8)}
    config = BuildConfig(precisions=("int8",), profiles=((shape, shape, shape),), optimization_level=0, timing_cache="")
    data = np.load(folder / "x.npy")
    plan = build_int8(network(), config, Calibration(samples=lambda: [{"x": a[None]} for a in data]))
    write_engine(plan, folder / "q.engine")
    code, out = run(folder / "q.engine", folder / "a.onnx", "--inputs", folder / "x.npy", "--json")
    found = json.loads(out)
    assert code == 0, out
    assert found["tolerance"] == 0.2
    (y,) = [r for r in found["values"] if r["tensor"] == "y"]
    assert 1e-4 < y["max_error"] < 0.2
    assert 10 < y["snr_db"] < 80
    code, out = run(folder / "q.engine", folder / "a.onnx", "--tolerance", 1e-5)
    assert code == 1


def test_values_are_saved(folder, tmp_path):
    assert run(folder / "a.onnx", "--saveValues", tmp_path / "v.npz")[0] == 0
    with np.load(tmp_path / "v.npz") as f:
        assert np.allclose(f["ours/conv1"], f["theirs/conv1"], atol=1e-5)


REFUSED = {
    "no second model": (["--against", "whet"], "compares two models"),
    "no such file": (["gone.onnx"], "cannot be read"),
    "no fp16 without fusing": (["--fp16"], "--fp16 is for --fused"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals_say_why(name, folder):
    from whet.errors import WhetError

    flags, words = REFUSED[name]
    got = CliRunner().invoke(command, [str(folder / "a.onnx"), *flags])
    assert isinstance(got.exception, WhetError)
    assert words in str(got.exception)


def test_nan_on_both_sides_is_reported(folder, tmp_path):
    np.save(tmp_path / "nan.npy", np.full((1, 3, 8, 8), np.nan, np.float32))
    said = CliRunner().invoke(command, [str(folder / "a.onnx"), f"--inputs={tmp_path / 'nan.npy'}"])
    assert said.exit_code == 0, said.output
    assert "NaN or infinities in 100 % of both" in " ".join(said.output.split())


def test_shapes_of_unknown_inputs_are_refused(folder):
    done = CliRunner().invoke(command, [str(folder / "a.onnx"), "--shapes=xx:1x3x8x8"])
    assert isinstance(done.exception, UsageError)
    assert "Did you mean 'x'" in str(done.exception)
