"""TensorRT as a peer of the GPU benchmarks, tested on whet.trt under TensorRT's name and host memory."""

import importlib
import sys
from pathlib import Path

import numpy as np
import pytest

import whet
import whet.trt
from whet.errors import UsageError
from whet.network import parse_network
from whet.ops import run_network

torch = pytest.importorskip("torch")
NET = """network n source
in %x: f32[N,8]
const %w: f32[8,3] = seed(1)
%y = Gemm(%x, %w)
out %y
"""


@pytest.fixture
def runner(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    monkeypatch.setitem(sys.modules, "tensorrt", whet.trt)
    return importlib.import_module("_tensorrt_runner").TensorRtRunner


def test_it_computes_on_the_tensors_it_is_bound_to(runner, tmp_path):
    model = str(whet.save_onnx(parse_network(NET), tmp_path / "n.onnx"))
    x = torch.randn(2, 8)
    run = runner(model, {"x": x}, ())
    wanted = run_network(parse_network(NET), {"x": 2 * x.numpy()})["y"]
    run.inputs["x"].mul_(2)
    assert run() is run.outputs
    np.testing.assert_allclose(run.outputs["y"].numpy(), wanted, rtol=1e-5, atol=1e-5)


def test_without_the_package_the_error_says_so(runner, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorrt", None)
    with pytest.raises(UsageError, match="TensorRT's Python package is not installed"):
        runner(str(tmp_path / "n.onnx"), {"x": torch.zeros(1, 8)}, ())
