"""`whet exec` on torch modules (--torch), with new weights in a saved engine (--refitFromOnnx), and trtexec's old flags."""

import numpy as np
import onnx
import pytest
from click.testing import CliRunner
from onnx import TensorProto, helper, numpy_helper

import whet
from whet.cli import group

QUICK = ["--iterations=1", "--duration=0", "--warmUp=0", "--builderOptimizationLevel=0", "--noBuilderCache"]


def run(*arguments):
    return CliRunner().invoke(group, ["exec", *QUICK, *arguments])


def save(path, seed, op="Relu"):
    """x [2, 4] -> Gemm -> op -> y [2, 3]; returns the weights."""
    rng = np.random.default_rng(seed)
    w, b = rng.standard_normal((3, 4)).astype("f4"), rng.standard_normal(3).astype("f4")
    nodes = [helper.make_node("Gemm", ["x", "w", "b"], ["h"], transB=1), helper.make_node(op, ["h"], ["y"])]
    x, y = (helper.make_tensor_value_info(n, TensorProto.FLOAT, [2, d]) for n, d in (("x", 4), ("y", 3)))
    graph = helper.make_graph(nodes, "g", [x], [y], [numpy_helper.from_array(w, "w"), numpy_helper.from_array(b, "b")])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), path)
    return w, b


def test_a_saved_engine_takes_the_weights_of_another_model(tmp_path):
    save(tmp_path / "a.onnx", 0)
    w, b = save(tmp_path / "b.onnx", 1)
    save(tmp_path / "c.onnx", 1, "Sigmoid")
    a, other = tmp_path / "a.engine", tmp_path / "b.engine"
    assert run(f"--onnx={tmp_path / 'a.onnx'}", f"--saveEngine={a}", "--skipInference", "--refit").exit_code == 0
    done = run(f"--loadEngine={a}", f"--refitFromOnnx={tmp_path / 'b.onnx'}", f"--saveEngine={other}", "--dumpRefit", "--timeRefit")
    assert done.exit_code == 0, done.output
    assert "Refittable weight b: f32[3]" in done.output
    assert "its outputs are the model's" in done.output
    assert "Engine refitted in" in done.output
    x = np.random.default_rng(2).standard_normal((2, 4)).astype("f4")
    np.testing.assert_allclose(whet.load(other)(x), np.maximum(x @ w.T + b, 0), rtol=1e-5, atol=1e-5)
    refused = run(f"--loadEngine={a}", f"--refitFromOnnx={tmp_path / 'c.onnx'}")
    assert refused.exit_code != 0
    assert "does not compute what the model does" in refused.output
    assert "to build from the model, give it to --onnx" in run(f"--onnx={tmp_path / 'a.onnx'}", f"--refitFromOnnx={tmp_path / 'b.onnx'}").output


MODULE = """
import torch

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = torch.nn.Conv2d(3, 4, 3)

    def forward(self, image):
        return self.conv(image).relu().mean((2, 3))

def bare():
    return Net()

def with_example():
    return Net(), torch.randn(2, 3, 8, 8)
"""


@pytest.mark.usefixtures("shared_registry")
def test_a_torch_module_is_built_from_the_function_that_makes_it(tmp_path, monkeypatch):
    pytest.importorskip("onnxscript", reason="the extra 'export' is not installed")
    (tmp_path / "mynets.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    built = run("--torch=python:mynets:with_example", f"--saveEngine={tmp_path / 'a.engine'}", "--shapes=image:4x3x8x8")
    assert built.exit_code == 0, built.output
    assert whet.load(tmp_path / "a.engine")(np.zeros((4, 3, 8, 8), "f4")).shape == (4, 4)
    assert run("--torch=python:mynets:bare", "--shapes=image:2x3x8x8").exit_code == 0
    assert "the function returns a module without example inputs; give --shapes" in run("--torch=python:mynets:bare").output
    assert "nothere" in run("--torch=python:mynets:nothere").output


def test_uff_is_answered_with_the_way_that_works():
    done = run("--uff=net.uff", "--uffInput=x,3,8,8")
    assert done.exit_code != 0
    assert "give the TensorFlow model itself to --onnx" in done.output
