"""INT8 through the command line: calibration data and caches, warnings without data, Q/DQ models unchanged."""

import json

import pytest
from click.testing import CliRunner

from whet.cli.exec import command
from whet.engine import read_engine

QUICK = ["--noBuilderCache", "--avgTiming=1", "--duration=0", "--iterations=1", "--warmUp=0", "--numThreads=1"]


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
