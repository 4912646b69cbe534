"""A real trained model, quantized by ONNX Runtime on real images, built as it is: integers throughout, the same answers as ONNX Runtime."""

import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))
from support import datasets, realdata
from whet.builder import build
from whet.builder.config import BuildConfig
from whet.builder.quantized import Calibration, build_int8
from whet.frontends import network_from_onnx
from whet.runtime import Runtime
from whet.tactics import is_quantized, tactics_of
from whet.tactics.cpu import _onednn as dnn

tactics_of("cpu")
pytestmark = [
    pytest.mark.skipif(datasets.root() is None, reason="no shared data folder"),
    pytest.mark.skipif(not dnn.has_isa("avx512_core_vnni"), reason="this CPU has no VNNI: quantized layers are refused"),
]
IMAGES = 96
QUICK = {"optimization_level": 1, "whole_engines": 0, "avg_timing": 1, "timing_cache": "", "threads": 1}


def config(**more):
    one, many = {"x": (1, 3, 32, 32)}, {"x": (8, 3, 32, 32)}
    return BuildConfig(profiles=((one, many, many),), **QUICK, **more)


def logits(run):
    x, _ = datasets.cifar10_lossless()
    images = datasets.imagenet_norm(x[:IMAGES])
    return np.concatenate([run(np.ascontiguousarray(images[i : i + 8])) for i in range(0, IMAGES, 8)])


@pytest.mark.parametrize("activations", ["QUInt8", "QInt8"])
def test_a_model_quantized_by_onnx_runtime(activations, tmp_path):
    ort = pytest.importorskip("onnxruntime")
    tool = pytest.importorskip("onnxruntime.quantization")
    (model,) = realdata.models(["resnet20_cifar10"])
    x, _ = datasets.cifar10_train_lossless()

    class Reader(tool.CalibrationDataReader):
        def __init__(self):
            self.left = iter([{"x": image[None]} for image in datasets.imagenet_norm(x[:16])])

        def get_next(self):
            return next(self.left, None)

    path = tmp_path / "qdq.onnx"
    tool.quantize_static(
        str(model.path), str(path), Reader(), quant_format=tool.QuantFormat.QDQ, per_channel=True,
        activation_type=getattr(tool.QuantType, activations), weight_type=tool.QuantType.QInt8,
    )  # fmt: skip
    plan = build(network_from_onnx(str(path)), config())
    weighted = [x for x in plan.network.layers if x.hint in ("Conv", "Gemm") or x.op in ("Conv", "Gemm")]
    assert len(weighted) == 20
    assert all(is_quantized(x) and plan.choices[x.name].tactic.startswith("cpu/onednn_q") for x in weighted)
    context = Runtime(threads=1).load(plan).create_context()
    session = ort.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    ours = logits(lambda a: context.run({"x": a})["logits"])
    theirs = logits(lambda a: session.run(None, {"x": a})[0])
    assert np.linalg.norm(ours - theirs) < 0.03 * np.linalg.norm(theirs)
    assert (ours.argmax(1) == theirs.argmax(1)).mean() > 0.97


def test_calibrated_on_real_images_answers_stay():
    (model,) = realdata.models(["resnet20_cifar10"])
    x, _ = datasets.cifar10_train_lossless()
    net = network_from_onnx(str(model.path))
    data = [{"x": image[None]} for image in datasets.imagenet_norm(x[:32])]
    floats = Runtime(threads=1).load(build(net, config(verify=False))).create_context()
    plan = build_int8(net, config(precisions=("int8",), backend="cpu", verify=False), Calibration(samples=lambda: data))
    integers = Runtime(threads=1).load(plan).create_context()
    want = logits(lambda a: floats.run({"x": a})["logits"])
    got = logits(lambda a: integers.run({"x": a})["logits"])
    noise = np.sum((got - want) ** 2)
    assert 10 * np.log10(np.sum(want**2) / max(noise, 1e-9)) > 22
    assert (got.argmax(1) == want.argmax(1)).mean() > 0.95
