"""Whole networks: read, run with the reference, compared with ONNX Runtime; then written, read again and compared once more."""

import numpy as np
import onnxruntime
import pytest

from support import datasets, realdata
from support.selection import with_slow_names
from whet import zoo
from whet.frontends import check_onnx, network_from_onnx, onnx_from_network
from whet.network import verify
from whet.ops import run_network
from whet.passes import lower

SMALL = {name: {"image": 64} for name in zoo.names()}  # small images; where there is an option, fewer channels or layers
SMALL |= {name: {"image": 64, "width": 16} for name in ("resnet18", "resnet34", "resnet50", "resnet101", "resnext50_32x4d", "unet")}
SMALL |= {"lenet5": {}, "bert_base": {"layers": 2, "sequence": "S", "hidden": 96, "heads": 6}, "vgg16": {"image": 64, "width": 16, "hidden": 128}}
SMALL |= {"vit_b_16": {"layers": 2, "image": 64, "hidden": 192, "heads": 6}, "swin_t": {"image": 64, "window": 2, "hidden": 48}}
SMALL |= {"convnext_tiny": {"image": 64, "widths": (24, 48, 96, 192)}}


def ort(model, feeds):
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    return dict(zip((o.name for o in session.get_outputs()), session.run(None, feeds), strict=True))


def some_inputs(net):
    """Seeded inputs: two samples, nine tokens."""
    rng = np.random.default_rng(0)
    feeds = {}
    for t in net.inputs:
        shape = [d if isinstance(d, int) else {"N": 2, "S": 9}[str(d)] for d in t.shape]
        feeds[t.name] = rng.integers(0, 2, shape) if t.dtype.kind == "int" else rng.standard_normal(shape).astype(np.float32)
    return feeds


def close(got, want, bound):
    """Names agree, and errors are within `bound` of each output's size."""
    assert list(got) == list(want)
    for name, w in want.items():
        g = got[name]
        assert (g.dtype, g.shape) == (w.dtype, w.shape)
        assert np.abs(g.astype(np.float64) - w).max() <= bound * max(np.abs(w).max(), 1e-6), name


@pytest.mark.parametrize("name", with_slow_names(sorted(SMALL), {"densenet121", "efficientnet_b0", "resnet34", "resnet101"}))
def test_zoo(name):
    model = zoo.build(name, **SMALL[name])
    net = verify(network_from_onnx(model))
    feeds = some_inputs(net)
    want = ort(model.SerializeToString(), feeds)
    got = run_network(net, feeds)
    close(got, want, 1e-4)
    again = verify(network_from_onnx(onnx_from_network(net)))
    assert len(again.layers) == len(net.layers)
    assert [layer.name for layer in again.layers] == [layer.name for layer in net.layers]
    close(run_network(again, feeds), got, 1e-6)


REAL = ["resnet20_cifar10", "resnet56_cifar10", "resnet8_mlperftiny", "lenet_mnist", "vit_mnist", "squeezenet1.1", "nanodet_m",
        "deeplabv3_mnv2_voc", "vww_mobilenet025_96", "version-RFB-320", "version-RFB-640", "version-slim-320",
        "version-RFB-320_without_postprocessing", "mobilenetv2_backbone", "resnet50v2_stages1-3"]  # fmt: skip


@pytest.mark.data
@pytest.mark.parametrize("name", with_slow_names(REAL, {"deeplabv3_mnv2_voc", "resnet50v2_stages1-3", "resnet56_cifar10", "version-RFB-640"}))
def test_real(name):
    if datasets.root() is None:
        pytest.skip("the shared data folder is not here")
    (model,) = realdata.models([name])
    net = verify(network_from_onnx(model.path))
    feeds = next(iter(model.inputs(1)))
    want = ort(str(model.path), feeds)
    close(run_network(net, feeds), want, 2e-5)
    written = onnx_from_network(net)
    close(ort(written.SerializeToString(), feeds), want, 2e-5)
    assert check_onnx(model.path).supported


@pytest.mark.data
def test_silero_with_its_lstm_and_branches():
    """If selects its branch by shapes and constants: with fixed shapes the branches are resolved when the model is read."""
    if datasets.root() is None:
        pytest.skip("the shared data folder is not here")
    path = datasets.path_of("audio/silero_vad_16k_op15.onnx")
    net = verify(network_from_onnx(path, shapes={"input": (1, 576), "state": (2, 1, 128)}))
    sound = (np.random.default_rng(0).standard_normal((1, 576)) * 0.1).astype(np.float32)
    feeds = {"input": sound, "state": np.zeros((2, 1, 128), np.float32), "sr": np.array(16000)}
    close(run_network(net, feeds), ort(str(path), feeds), 2e-5)


@pytest.mark.parametrize("name", ["resnet18", "mobilenet_v3_large", "yolov5s", "vit_b_16", "bert_base"])
def test_a_lowered_network_is_written_unfused(name):
    """ONNX Runtime, which shares no code with whet, checks passes and writer together."""
    net = network_from_onnx(zoo.build(name, **SMALL[name]))
    lowered, _ = lower(net)
    assert any(layer.op == "Fused" for layer in lowered.layers)
    feeds = some_inputs(net)
    close(ort(onnx_from_network(lowered).SerializeToString(), feeds), run_network(net, feeds), 1e-4)
