"""Every convolutional network, from file to engine to outputs: as near to float64 as design allows, scores as stated.

"Right" for a whole network: error against float64, max over outputs of ||e||/||ref|| and max|e|/max|ref|, at most 4 times
ONNX Runtime's own, with a floor of 1e-5.
"""

from functools import cache

import numpy as np
import onnxruntime as ort
import pytest

from support.datasets import root
from support.realdata import evaluate, models
from whet.builder import build
from whet.builder.config import BuildConfig
from whet.frontends import network_from_onnx
from whet.ops import run_network
from whet.runtime import Runtime

FLOOR = 1e-5


def relative_error(got: dict, want: dict) -> float:
    """Max over outputs of both norms' relative errors."""
    worst = 0.0
    for name, ref in want.items():
        e = np.asarray(got[name], np.float64) - ref
        for norm in (np.linalg.norm, lambda a: np.abs(a).max(initial=0.0)):
            scale = float(norm(ref.reshape(-1)))
            worst = max(worst, float(norm(e.reshape(-1))) / scale if scale else float(norm(e.reshape(-1))))
    return worst


def onnxruntime_outputs(session: ort.InferenceSession, feeds: dict) -> dict:
    return dict(zip((o.name for o in session.get_outputs()), session.run(None, feeds), strict=True))


@cache
def engine_of(path: str, shapes: tuple[tuple[str, tuple[int, ...]], ...]):
    net = network_from_onnx(path)
    opt = dict(shapes)
    dynamic = any(not t.type.static for t in net.inputs)
    config = BuildConfig(profiles=((opt, opt, opt),) if dynamic else (), optimization_level=2, avg_timing=2, timing_cache="", threads=2)
    return net, Runtime().load(build(net, config))


@pytest.mark.data
@pytest.mark.skipif(root() is None, reason="the shared data folder is not here (WHET_DATA names another place)")
@pytest.mark.parametrize("model", models() if root() else [], ids=lambda m: m.name)
def test_real_model_is_right(model):
    feeds = next(model.inputs(1))
    net, engine = engine_of(str(model.path), tuple((k, v.shape) for k, v in feeds.items()))
    with engine.create_context() as context:
        want = run_network(net, feeds, widen=True)
        session = ort.InferenceSession(str(model.path), providers=["CPUExecutionProvider"])
        theirs = onnxruntime_outputs(session, feeds)
        bound = max(4 * relative_error(theirs, want), FLOOR)
        assert relative_error(context.run(feeds), want) <= bound
        if model.metrics:
            some = evaluate(model, context.run, limit=24)
            peer = evaluate(model, lambda f: onnxruntime_outputs(session, f), limit=24)
            for metric in model.metrics:
                assert some[metric.name] == pytest.approx(peer[metric.name], abs=1e-3)


ZOO = ["lenet5", "squeezenet1_1", "mobilenet_v2", "resnet18"]
BIG = ["resnet50", "yolov5s", "vit_b_16", "efficientnet_b0", "densenet121", "resnext50_32x4d", "mobilenet_v3_large"]


@pytest.mark.parametrize("name", [*ZOO, *(pytest.param(n, marks=pytest.mark.slow) for n in BIG)])
def test_zoo_network_is_right(name, tmp_path):
    from whet import zoo

    path = zoo.save(name, tmp_path / f"{name}.onnx", batch=1)
    session = ort.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    rng = np.random.default_rng(0)
    feeds = {i.name: rng.standard_normal(i.shape).astype(np.float32) for i in session.get_inputs()}
    net, engine = engine_of(str(path), ())
    want = run_network(net, feeds, widen=True)
    theirs = onnxruntime_outputs(session, feeds)
    with engine.create_context() as context:
        assert relative_error(context.run(feeds), want) <= max(4 * relative_error(theirs, want), FLOOR)
