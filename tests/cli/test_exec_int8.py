"""INT8 through the command line: calibration data and caches, warnings without data, Q/DQ models unchanged."""

import json

import numpy as np
import pytest
from click.testing import CliRunner

from whet.cli.exec import command
from whet.engine import read_engine
from whet.frontends.onnx_writer import save_onnx
from whet.network import Network, parse_type

QUICK = ["--noBuilderCache", "--avgTiming=1", "--duration=0", "--iterations=1", "--warmUp=0", "--numThreads=1"]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A small convolutional network with a residual, as ONNX, and data for it."""
    rng = np.random.default_rng(1)
    net = Network("small")

    def w(*shape):
        return net.constant((rng.standard_normal(shape) / np.sqrt(np.prod(shape[1:]))).astype(np.float32), "w")

    x = net.add_input("x", parse_type("f32[1,3,16,16]"))
    a = net.add("Relu", net.add("Conv", x, w(32, 3, 3, 3), pads=(1,) * 4))
    b = net.add("Relu", net.add("Conv", a, w(32, 32, 3, 3), pads=(1,) * 4))
    c = net.add("Relu", net.add("Add", net.add("Conv", b, w(32, 32, 3, 3), pads=(1,) * 4), a))
    net.mark_output(net.add("Gemm", net.add("Flatten", net.add("GlobalAveragePool", c)), w(32, 5)), "y")
    folder = tmp_path_factory.mktemp("int8")
    save_onnx(net, folder / "m.onnx")
    np.savez(folder / "data.npz", x=rng.standard_normal((8, 3, 16, 16)).astype(np.float32))
    return folder


def run(folder, *flags):
    got = CliRunner().invoke(command, [f"--onnx={folder}/m.onnx", *flags, *QUICK])
    return got.exit_code, got.output


def test_calibrates_and_reports_the_comparison(model):
    code, out = run(model, "--int8", f"--calibData={model}/data.npz", f"--calib={model}/c.json")
    assert code == 0, out
    assert "[I] INT8 pays: floating point" in out or "[W] --int8 is permitted but does not pay here: floating point" in out
    assert "INVENTED" not in out
    cache = json.loads((model / "c.json").read_text())
    assert cache["samples"] == 8
    assert "x" in cache["tensors"]
    before = (model / "c.json").read_bytes()
    code, out = run(model, "--int8", f"--calib={model}/c.json")
    assert code == 0, out
    assert "INVENTED" not in out
    assert (model / "c.json").read_bytes() == before


def test_without_data_it_warns_loudly(model):
    code, out = run(model, "--int8", "--builderOptimizationLevel=0")
    assert code == 0, out
    assert "INVENTED" in out


def test_best_without_data_leaves_int8_out(model):
    code, out = run(model, "--best", "--builderOptimizationLevel=0")
    assert code == 0, out
    assert "--best leaves INT8 out" in out


REFUSED = {
    "no permission": (["--calib=c.cache"], "is for --int8"),
    "no such data": (["--int8", "--calibData=nowhere"], "no such file or folder"),
    "method": (["--int8", "--calibMethod=median"], "none of auto, minmax"),
    "preprocessing": (["--int8", "--calibData=.", "--calibPreprocess=sharpen:1"], "is none of scale:"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refusals_say_why(name, model):
    flags, words = REFUSED[name]
    code, out = run(model, *flags)
    assert code == 2, out
    assert words in out


def test_verification_is_on_by_default(model):
    """A verified engine stores its outputs for seeded inputs; an unverified one has none."""
    probes = []
    for k, flags in enumerate(([], ["--noVerify"])):
        code, out = run(model, f"--saveEngine={model}/{k}.engine", "--builderOptimizationLevel=0", "--buildOnly", *flags)
        assert code == 0, out
        probes.append(read_engine(model / f"{k}.engine").probe)
    assert probes[0]
    assert not probes[1]
