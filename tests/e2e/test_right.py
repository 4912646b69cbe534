"""Every real convolutional network through `whet exec`, from file to engine to outputs: the error bound of the design, scores as stated."""

import pytest

from support.datasets import root
from support.realdata import evaluate, models
from support.right import judged, onnxruntime_outputs
from whet.runtime import Runtime

# Large ones are built at level 1, the others at level 2, which times more candidates.
LARGE = {
    "deeplabv3_mnv2_voc", "version-RFB-640", "version-RFB-320_without_postprocessing", "version-slim-320", "resnet50v2_stages1-3", "nanodet_m",
    "version-RFB-320", "mobilenetv2_backbone",
}  # fmt: skip
# Each has a smaller variant in the list (another input, or a longer network of the same blocks), or is read and run by other tests in make test.
SLOW = LARGE - {"mobilenetv2_backbone"} | {"resnet20_cifar10", "resnet56_cifar10", "squeezenet1.1", "squeezenet1.1_reference"}
MODELS = [pytest.param(m, id=m.name, marks=[pytest.mark.slow] if m.name in SLOW else []) for m in (models() if root() else [])]


@pytest.mark.data
@pytest.mark.parametrize("model", MODELS)
def test_a_real_model_is_accurate(model, tmp_path):
    engine, session = judged(model.path, next(model.inputs(1)), tmp_path, level=1 if model.name in LARGE else 2)
    if model.metrics:
        with Runtime(backend="cpu", threads=2).load(engine).create_context() as context:
            some = evaluate(model, context.run, limit=24)
        peer = evaluate(model, lambda f: onnxruntime_outputs(session, f), limit=24)
        for metric in model.metrics:
            assert some[metric.name] == pytest.approx(peer[metric.name], abs=1e-3)
