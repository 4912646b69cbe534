"""TensorRT as another executor, tested on whet.trt under TensorRT's name: values, comparisons, and messages."""

import json
import sys

import numpy as np
import pytest
from click.testing import CliRunner

import whet
import whet.trt
from whet.cli import group
from whet.errors import BuildError, ShapeError, UsageError
from whet.measure.engine_comparison import compare_engines
from whet.measure.tensorrt_engine import build_tensorrt
from whet.network import parse_network
from whet.ops import run_network

NET = """network n source
in %x: f32[N,8,6,6]
const %w: f32[8,8,3,3] = seed(1)
%c = Conv(%x, %w, pads=(1,1,1,1))
%y = Relu(%c)
out %y
"""


@pytest.fixture(autouse=True)
def tensorrt(monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorrt", whet.trt)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(whet.save_onnx(parse_network(NET), tmp_path_factory.mktemp("trt") / "n.onnx"))


def test_its_engine_has_inputs_contexts_and_right_values(model):
    engine = build_tensorrt(model, shapes={"x": (2, 8, 6, 6)}, optimization_level=0)
    assert [str(engine.dtype(n)) for n in ("x", "y")] == ["f32", "f32"]
    x = np.random.default_rng(0).standard_normal((2, 8, 6, 6)).astype(np.float32)
    with engine.create_context() as context:
        assert context.input_shapes() == {"x": (2, 8, 6, 6)}
        got = context.run({"x": x})["y"]
        with pytest.raises(ShapeError, match=r"does not take \[3, 8, 6, 6\] for 'x'"):
            context.input_shapes({"x": (3, 8, 6, 6)})
    np.testing.assert_allclose(got, run_network(parse_network(NET), {"x": x})["y"], rtol=1e-4, atol=1e-4)


def test_it_is_timed_interleaved_with_whet_on_the_same_inputs(model):
    at = {"x": (1, 8, 6, 6)}
    ours = whet.build(model, shapes=at, timing_cache="", optimization_level=0)
    rows = compare_engines({"whet": ours, "TensorRT": build_tensorrt(model, shapes=at, optimization_level=0)}, seconds=0.05)
    assert [r.name for r in rows] == ["whet", "TensorRT"]
    assert rows[1].latency_ms > 0
    assert rows[1].max_error < 1e-4


def test_compare_adds_tensorrts_engine_of_a_model(model, tmp_path):
    arguments = ["compare", model, "--tensorrt", "--shapes=x:1x8x6x6", "--seconds=0.05", "--timingCacheFile="]
    done = CliRunner().invoke(group, [*arguments, f"--html={tmp_path / 'c.html'}", "--json"])
    assert done.exit_code == 0, done.output
    engines = json.loads(done.stdout)["engines"]
    assert [(e["name"], "layers" in e) for e in engines] == [("n", True), ("TensorRT n", False)]
    assert engines[1]["snr_db"] is None or engines[1]["snr_db"] > 80
    assert "TensorRT n" in (tmp_path / "c.html").read_text()


def test_what_it_cannot_do_is_said(model, tmp_path, monkeypatch):
    (tmp_path / "broken.onnx").write_bytes(b"no model")
    with pytest.raises(BuildError, match=r"TensorRT 10.* does not read .*broken.onnx"):
        build_tensorrt(str(tmp_path / "broken.onnx"))
    with pytest.raises(BuildError, match=r"builds no engine of .*: .+"):
        build_tensorrt(model, precisions=["int8"], shapes={"x": (1, 8, 6, 6)}, optimization_level=0)  # neither Q/DQ nor ranges
    monkeypatch.setitem(sys.modules, "tensorrt", None)
    with pytest.raises(UsageError, match="pip install tensorrt"):
        build_tensorrt(model)
