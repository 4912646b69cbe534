"""Real trained models with existing quantization, built unchanged: integers throughout, the same results as ONNX Runtime.

Quantized by ONNX Runtime, and in the styles of NVIDIA's and PyTorch's quantizers, constructed here from the real weights.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))
from support import datasets, realdata
from whet.builder import build
from whet.builder.config import BuildConfig
from whet.builder.precision.int8 import Calibration, build_int8
from whet.frontends import network_from_onnx
from whet.frontends.onnx_all_outputs import with_all_outputs
from whet.runtime import Runtime
from whet.tactics import is_quantized, list_tactics
from whet.tactics.cpu.onednn import _api as dnn

list_tactics("cpu")
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
    weighted = [x for x in plan.network.layers if x.composite in ("Conv", "Gemm") or x.op in ("Conv", "Gemm")]
    assert len(weighted) == 20
    assert all(is_quantized(x) and plan.choices[x.name].tactic.startswith("cpu/onednn_q") for x in weighted)
    context = Runtime(threads=1).load(plan).create_context()
    session = ort.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    ours = logits(lambda a: context.run({"x": a})["logits"])
    theirs = logits(lambda a: session.run(None, {"x": a})[0])
    assert np.linalg.norm(ours - theirs) < 0.03 * np.linalg.norm(theirs)
    assert (ours.argmax(1) == theirs.argmax(1)).mean() > 0.97


def quantized_as(style, path):
    """resnet20_cifar10 as exported by a quantizer, with ranges from 16 real images.

    "nvidia": float weights with per-channel Q and DQ; separate Q/DQ (i8, zero point 0) before each convolution, before the classifier,
    on the identity of each residual sum, and before the pool. "pytorch": i8 weights with DQ only; Q/DQ (u8 with zero points) after each
    activation and on both summands.
    """
    import onnx
    import onnxruntime as ort
    from onnx import helper, numpy_helper

    (model,) = realdata.models(["resnet20_cifar10"])
    proto = onnx.load(str(model.path))
    marked, _ = with_all_outputs(model.path)
    x, _ = datasets.cifar10_train_lossless()
    session = ort.InferenceSession(marked, providers=["CPUExecutionProvider"])
    images = datasets.imagenet_norm(x[:16])
    values = dict(zip([o.name for o in session.get_outputs()], session.run(None, {"x": images}), strict=True)) | {"x": images}
    weights = {w.name: numpy_helper.to_array(w) for w in proto.graph.initializer}
    nodes, constants = [], []

    def const(name, array):
        constants.append(numpy_helper.from_array(array, name))
        return name

    def fake(t, tag):
        a = values[t]
        if style == "nvidia":
            scale, zero = np.float32(np.abs(a).max() / 127), np.int8(0)
        else:
            low, high = min(float(a.min()), 0.0), float(a.max())
            scale = np.float32((high - low) / 255)
            zero = np.uint8(round(-low / float(scale)))
        s, z = const(f"{tag}.s", np.asarray(scale)), const(f"{tag}.z", np.asarray(zero))
        nodes.append(helper.make_node("QuantizeLinear", [t, s, z], [f"{tag}.q"], f"{tag}/Q"))
        nodes.append(helper.make_node("DequantizeLinear", [f"{tag}.q", s, z], [f"{tag}.dq"], f"{tag}/DQ"))
        return f"{tag}.dq"

    def fake_weight(w, tag):
        a = weights[w]
        s = (np.abs(a).reshape(len(a), -1).max(1) / 127).astype(np.float32)
        ws, wz = const(f"{tag}.s", s), const(f"{tag}.z", np.zeros(len(a), np.int8))
        if style == "nvidia":
            nodes.append(helper.make_node("QuantizeLinear", [w, ws, wz], [f"{tag}.q"], f"{tag}/Q", axis=0))
        else:
            shape = (-1, *[1] * (a.ndim - 1))
            const(f"{tag}.q", np.clip(np.rint(a / s.reshape(shape)), -128, 127).astype(np.int8))
        nodes.append(helper.make_node("DequantizeLinear", [f"{tag}.q", ws, wz], [f"{tag}.dq"], f"{tag}/DQ", axis=0))
        return f"{tag}.dq"

    renamed = {}  # pytorch: readers take the value after its Q/DQ
    for i, node in enumerate(proto.graph.node):
        made = onnx.NodeProto()
        made.CopyFrom(node)
        made.input[:] = [renamed.get(n, n) for n in node.input]
        if node.op_type in ("Conv", "Gemm"):
            if style == "nvidia":
                made.input[0] = fake(node.input[0], f"{node.name}.input{i}")
            elif node.input[0] == "x":
                made.input[0] = fake("x", "x.in")
            made.input[1] = fake_weight(node.input[1], f"{node.name}.weight")
        elif style == "nvidia" and node.op_type == "Add":
            made.input[1] = fake(node.input[1], f"{node.name}.residual")
        elif style == "nvidia" and node.op_type in ("ReduceMean", "GlobalAveragePool"):
            made.input[0] = fake(node.input[0], f"{node.name}.pooled")
        nodes.append(made)
        behind = {n.op_type for n in proto.graph.node if node.output[0] in n.input}
        if style == "pytorch" and node.op_type in ("Conv", "Relu", "Add", "Pad", "ReduceMean", "GlobalAveragePool") and behind != {"Relu"}:
            renamed[node.output[0]] = fake(node.output[0], f"{node.name}.post")
    del proto.graph.node[:]
    proto.graph.node.extend(nodes)
    proto.graph.initializer.extend(constants)
    onnx.save(proto, path)


@pytest.mark.parametrize("style", ["nvidia", "pytorch"])
def test_qat_models_run_in_integers_throughout(style, tmp_path):
    """Residual sums, shortcuts and the pool included: no float arithmetic remains between the input and the classifier."""
    ort = pytest.importorskip("onnxruntime")
    path = tmp_path / "qat.onnx"
    quantized_as(style, path)
    plan = build(network_from_onnx(str(path)), config())
    layers = plan.network.layers
    weighted = [x for x in layers if x.composite in ("Conv", "Gemm") or x.op in ("Conv", "Gemm")]
    assert len(weighted) == 20
    assert all(is_quantized(x) and plan.choices[x.name].tactic.startswith("cpu/onednn_q") for x in weighted)
    assert not [x.name for x in layers if x.op in ("Add", "Relu", "AveragePool", "GlobalAveragePool", "ReduceMean")]
    assert not [x.name for x in layers if plan.choices[x.name].tactic.endswith("numpy_reference")]
    sums = [x for x in layers if x.op == "Fused" and any(y.op == "Add" for y in x.regions["body"].layers)]
    assert len(sums) == 9
    context = Runtime(threads=1).load(plan).create_context()
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    ours = logits(lambda a: context.run({"x": a})["logits"])
    theirs = logits(lambda a: session.run(None, {"x": a})[0])
    assert np.linalg.norm(ours - theirs) < 0.03 * np.linalg.norm(theirs)
    assert (ours.argmax(1) == theirs.argmax(1)).mean() > 0.97


def small_weights(kind, path):
    """The MNIST network's first product with blocked int4 weights, or with float8 (e4m3) input and weights. Opset 21."""
    import onnx
    from onnx import TensorProto, helper, numpy_helper, version_converter

    (model,) = realdata.models(["lenet_mnist"])
    proto = version_converter.convert_version(onnx.load(str(model.path)), 21)
    node = next(n for n in proto.graph.node if n.op_type == "Gemm")
    initializer = next(w for w in proto.graph.initializer if w.name == node.input[1])
    w = numpy_helper.to_array(initializer)
    place = list(proto.graph.node).index(node)
    if kind == "int4 blocked":
        block = 4
        scales = (np.abs(w).reshape(w.shape[0], -1, block).max(2) / 7).astype(np.float32) + np.float32(1e-6)
        q = np.clip(np.rint(w / np.repeat(scales, block, axis=1)), -8, 7).astype(np.int8)
        more = [helper.make_tensor("w4", TensorProto.INT4, q.shape, q.reshape(-1)), numpy_helper.from_array(scales, "w4.s")]
        added = [helper.make_node("DequantizeLinear", ["w4", "w4.s"], ["w4.dq"], "w4/DQ", axis=1, block_size=block)]
        node.input[1] = "w4.dq"
    else:
        s = np.float32(np.abs(w).max() / 448)
        more = [numpy_helper.from_array(np.asarray(s), "ws"), numpy_helper.from_array(np.asarray(np.float32(0.02)), "xs"),
                helper.make_tensor("z8", TensorProto.FLOAT8E4M3FN, (), [0.0])]  # fmt: skip
        added = []
        for t, scale, tag in ((node.input[0], "xs", "x8"), (node.input[1], "ws", "w8")):
            added.append(helper.make_node("QuantizeLinear", [t, scale, "z8"], [f"{tag}.q"], f"{tag}/Q"))
            added.append(helper.make_node("DequantizeLinear", [f"{tag}.q", scale, "z8"], [f"{tag}.dq"], f"{tag}/DQ"))
        node.input[0], node.input[1] = "x8.dq", "w8.dq"
    proto.graph.initializer.extend(more)
    for k, n in enumerate(added):
        proto.graph.node.insert(place + k, n)
    onnx.save(proto, path)
    return model


@pytest.mark.parametrize("kind", ["int4 blocked", "float8"])
def test_4_bit_and_float8_weights_compute_correctly(kind, tmp_path):
    """Without kernels for them they run dequantized, and equal ONNX Runtime, predicted digits included."""
    ort = pytest.importorskip("onnxruntime")
    path = tmp_path / "small.onnx"
    model = small_weights(kind, path)
    one, many = {"x": (1, 1, 28, 28)}, {"x": (8, 1, 28, 28)}
    plan = build(network_from_onnx(str(path)), BuildConfig(profiles=((one, many, many),), **QUICK))
    context = Runtime(threads=1).load(plan).create_context()
    session = ort.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    images = np.concatenate([f["x"] for f in model.inputs(64)])
    ours = np.concatenate([next(iter(context.run({"x": images[i : i + 8]}).values())) for i in range(0, 64, 8)])
    theirs = session.run(None, {session.get_inputs()[0].name: images})[0]
    assert np.linalg.norm(ours - theirs) < 2e-3 * np.linalg.norm(theirs)
    labels = datasets.mnist_test()[1][datasets.spread(10000, 64)]
    assert (ours.argmax(1) == labels).mean() > 0.95


def test_calibrated_on_real_images_accuracy_is_kept():
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


def test_two_calibrations_write_the_same_bytes(tmp_path):
    """In two processes, with one model and the same images, in another order, batch size and number of threads."""
    (model,) = realdata.models(["resnet20_cifar10"])
    x, _ = datasets.cifar10_train_lossless()
    images = datasets.imagenet_norm(x[:8])
    np.savez(tmp_path / "all.npz", x=images)
    parts = tmp_path / "parts"
    parts.mkdir()
    for k, part in enumerate(np.split(images[::-1], [1, 2, 5])):
        np.save(parts / f"{k}.npy", part)
    found = []
    for k, (data, threads) in enumerate([(tmp_path / "all.npz", 1), (parts, 2)]):
        cache = tmp_path / f"{k}.json"
        words = [f"--onnx={model.path}", "--int8", f"--calibData={data}", f"--calib={cache}", "--shapes=x:1x3x32x32"]
        quick = [f"--numThreads={threads}", "--builderOptimizationLevel=0", "--noVerify", "--noBuilderCache", "--buildOnly"]
        done = subprocess.run(
            [sys.executable, "-m", "whet.cli", "exec", *words, *quick], capture_output=True, text=True, check=False,
            env={**os.environ, "PYTHONHASHSEED": str(k + 1)},
        )  # fmt: skip
        assert done.returncode == 0, done.stdout[-2000:]
        found.append(cache.read_bytes())
    assert found[0] == found[1]
    assert len(json.loads(found[0])["tensors"]) >= 20
