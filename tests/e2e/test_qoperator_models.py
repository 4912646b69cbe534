"""Real trained models in QOperator form by ONNX Runtime's quantizer: integers throughout, the same results as ONNX Runtime."""

import sys
from pathlib import Path

import numpy as np
import onnx
import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))
from support import datasets, realdata
from support.isa import HAS_VNNI, VNNI
from whet.builder import build
from whet.builder.config import BuildConfig
from whet.frontends import network_from_onnx
from whet.ops import run_network
from whet.runtime import Runtime
from whet.tactics import is_quantized, list_tactics

list_tactics("cpu")
pytestmark = pytest.mark.data
IMAGES = 96


def quantized(path, name, images, into, activations="QUInt8"):
    """The model in QOperator form, calibrated on `images`; its ops."""
    tool = pytest.importorskip("onnxruntime.quantization")
    (model,) = realdata.models([name])

    class Reader(tool.CalibrationDataReader):
        def __init__(self):
            self.left = iter([{into: image[None]} for image in images])

        def get_next(self):
            return next(self.left, None)

    tool.quantize_static(
        str(model.path), str(path), Reader(), quant_format=tool.QuantFormat.QOperator, per_channel=True,
        activation_type=getattr(tool.QuantType, activations), weight_type=tool.QuantType.QInt8, reduce_range=not HAS_VNNI,
    )  # fmt: skip
    return {n.op_type for n in onnx.load(path).graph.node}


def both(path, into, images):
    """Logits of `images` by the engine and by ONNX Runtime, and the plan."""
    ort = pytest.importorskip("onnxruntime")
    one, many = ({into: (n, *images.shape[1:])} for n in (1, 8))
    config = BuildConfig(
        profiles=((one, many, many),), optimization_level=1, whole_engines=0, avg_timing=1, timing_cache="", threads=1
    )  # fmt: skip
    plan = build(network_from_onnx(str(path)), config)
    context = Runtime(threads=1).load(plan).create_context()
    session = ort.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    ours, theirs = [], []
    for i in range(0, len(images), 8):
        batch = np.ascontiguousarray(images[i : i + 8])
        ours.append(next(iter(context.run({into: batch}).values())))
        theirs.append(session.run(None, {into: batch})[0])
    return np.concatenate(ours), np.concatenate(theirs), plan


@VNNI
@pytest.mark.parametrize("activations", ["QUInt8", "QInt8"])
def test_a_resnet_runs_in_integers(activations, tmp_path):
    train, test = datasets.cifar10_train_lossless()[0], datasets.cifar10_lossless()[0]
    path = tmp_path / "qop.onnx"
    ops = quantized(path, "resnet20_cifar10", datasets.imagenet_norm(train[:16]), "x", activations)
    assert {"QLinearConv", "QLinearAdd", "QGemm"} <= ops
    ours, theirs, plan = both(path, "x", datasets.imagenet_norm(test[:IMAGES]))
    weighted = [x for x in plan.network.layers if x.composite in ("Conv", "Gemm") or x.op in ("Conv", "Gemm")]
    assert len(weighted) == 20
    assert all(is_quantized(x) and plan.choices[x.name].tactic.startswith("cpu/onednn_q") for x in weighted)
    floats = [x for x in plan.network.layers if x.op in ("Add", "Relu", "AveragePool", "GlobalAveragePool")]
    assert not floats, "sums and pools are integers too"
    assert np.linalg.norm(ours - theirs) < 0.04 * np.linalg.norm(theirs)
    assert (ours.argmax(1) == theirs.argmax(1)).mean() > 0.96


def test_concats_and_pools_of_a_squeezenet(tmp_path):
    """QLinearConcat, QLinearGlobalAveragePool: the values of the network against ONNX Runtime's."""
    ort = pytest.importorskip("onnxruntime")
    images = datasets.imagenet_norm(datasets.imagenet_sample(6)[0])
    path = tmp_path / "qop.onnx"
    ops = quantized(path, "squeezenet1.1", images[:4], "data")
    assert {"QLinearConv", "QLinearConcat", "QLinearGlobalAveragePool"} <= ops
    net = network_from_onnx(str(path))
    (got,) = run_network(net, {"data": images[4:5]}).values()
    (want,) = ort.InferenceSession(str(path), providers=["CPUExecutionProvider"]).run(None, {"data": images[4:5]})
    assert np.linalg.norm(got - want) < 0.04 * np.linalg.norm(want)
