"""`whet debug precision`: the most sensitive layer is listed first, the JSON is complete, the picture is self-contained."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

sys.path.insert(0, str(Path(__file__).parents[1] / "precision"))
from test_budget import samples, spiky_network

from report.page_parser import chart_data, check_page
from whet.cli.debug import command
from whet.errors import UsageError
from whet.frontends.onnx_writer import save_onnx

FLAGS = ("--builderOptimizationLevel=1", "--numThreads=1", "--shapes=x:1x3x12x12")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("debug")
    save_onnx(spiky_network(), made / "m.onnx")
    np.save(made / "x.npy", np.concatenate([f["x"] for f in samples(12)]))
    return made


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def run(folder, *args):
    return CliRunner().invoke(command, ["precision", str(folder / "m.onnx"), f"--calibData={folder / 'x.npy'}", *FLAGS, *map(str, args)])


def test_the_most_sensitive_layer_is_first_with_its_times(folder, tmp_path):
    got = run(folder, "--int8", "--json", "--plot", tmp_path / "p.html")
    assert got.exit_code == 0, got.output
    data = json.loads(got.output)
    rows = data["rows"]
    assert rows[0]["layer"] == "b"
    assert rows[0]["from_here_db"] == pytest.approx(data["all_db"])
    assert rows[1]["from_here_db"] > data["all_db"] + 10
    assert all(r["tensor_db"] is not None for r in rows)
    assert [r["alone_db"] for r in rows] == sorted(r["alone_db"] for r in rows)
    assert data["float_ms"] > 0
    bars, _ = chart_data((tmp_path / "p.html").read_text())["figures"]["sensitivity"]["data"]
    assert bars["x"] == pytest.approx([r["alone_db"] for r in rows])


@pytest.mark.parametrize("kind", ["--fp8", "--fp16", "--bf16"])
def test_other_precisions_are_emulated(folder, tmp_path, kind):
    got = run(folder, kind, "--noTimes", "--samples=3", "--plot", tmp_path / "p.html", "--top=2")
    assert got.exit_code == 0, got.output
    assert f"{kind[2:]}: sensitivity by layer, on 3 samples" in got.output
    check_page((tmp_path / "p.html").read_text())
    if kind == "--bf16":  # more layers than weighted ones: the Relu too
        assert "and 2 less sensitive layers" in got.output


def test_missing_data_are_reported(folder):
    got = CliRunner().invoke(command, ["precision", str(folder / "m.onnx"), "--fp16", "--noTimes", *FLAGS])
    assert got.exit_code == 0, got.output
    assert "no calibration data" in " ".join(got.output.split())


def test_another_file_extension_is_refused_before_any_work(folder):
    got = run(folder, "--plot", "p.jpg")
    assert isinstance(got.exception, UsageError)
    assert "ends in .html" in str(got.exception)
