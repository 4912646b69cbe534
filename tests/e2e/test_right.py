"""Every real convolutional network through `whet exec`, from file to engine to outputs: as near to float64 as design allows, scores as stated."""

import pytest

from support.datasets import root
from support.realdata import evaluate, models
from support.right import judged, onnxruntime_outputs
from whet.runtime import Runtime


@pytest.mark.data
@pytest.mark.parametrize("model", models() if root() else [], ids=lambda m: m.name)
def test_real_model_is_right(model, tmp_path):
    engine, session = judged(model.path, next(model.inputs(1)), tmp_path)
    if model.metrics:
        with Runtime(backend="cpu", threads=2).load(engine).create_context() as context:
            some = evaluate(model, context.run, limit=24)
        peer = evaluate(model, lambda f: onnxruntime_outputs(session, f), limit=24)
        for metric in model.metrics:
            assert some[metric.name] == pytest.approx(peer[metric.name], abs=1e-3)
