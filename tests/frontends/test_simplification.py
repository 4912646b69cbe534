"""Import and the first passes leave nothing to tools that simplify ONNX files: nodes and values of the models of benchmarks/simplifiers.py."""

from pathlib import Path

import numpy as np
import onnx
import pytest

ort = pytest.importorskip("onnxruntime")

with pytest.MonkeyPatch.context() as patch:
    patch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    from _simplifier_models import MODELS, model_of
    from simplifiers import count, simplify


def outputs(model, feeds):
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(None, {i.name: feeds[i.name] for i in session.get_inputs()})


@pytest.mark.parametrize("name", MODELS)
def test_few_nodes_remain_and_compute_the_same(name):
    model = model_of(name)
    onnx.checker.check_model(model)
    made = simplify(model.SerializeToString())
    assert count(made.graph).total() == MODELS[name][2], onnx.printer.to_text(made)
    rng = np.random.default_rng(1)
    feeds = {
        i.name: rng.standard_normal([d.dim_value or 2 for d in i.type.tensor_type.shape.dim]).astype(np.float32) for i in model.graph.input
    }
    for want, got in zip(outputs(model, feeds), outputs(made, feeds), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
