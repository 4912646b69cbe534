"""Fine-tuning at its defaults trains the exports that users have: batch norms as they are, and folded into the convolutions by the exporter."""

import csv
import math

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the extra 'train' is not installed: pip install torch==2.13.0")

from whet import zoo
from whet.frontends import network_from_onnx
from whet.training import FinetuneConfig, TrainingData, finetune
from whet.training.tuning import fold_batch_norms

NETWORKS = {
    "resnet18": {"image": 32},
    "resnext50_32x4d": {"image": 32, "width": 16},
    "densenet121": {"image": 32, "blocks": (2, 3, 3, 2)},
    "mobilenet_v2": {"image": 32},
    "efficientnet_b0": {"image": 32},
}


@pytest.fixture(scope="module")
def images():
    """Ten classes: ten random images with noise."""
    rng = np.random.default_rng(0)
    labels = np.arange(200) % 10
    x = rng.standard_normal((10, 3, 32, 32))[labels] + 0.5 * rng.standard_normal((200, 3, 32, 32))
    return TrainingData({"x": x.astype(np.float32)}, labels.astype(np.int64))


@pytest.mark.slow
@pytest.mark.parametrize("exported", ["with batch norms", "folded"])
@pytest.mark.parametrize("name", NETWORKS)
def test_the_defaults_train(name, exported, images, tmp_path):
    """Random weights of resnext50_32x4d without batch norms give outputs of ten and more: they need some epochs to get to order."""
    net = network_from_onnx(zoo.build(name, **NETWORKS[name]))
    assert any(x.op == "BatchNormalization" for x in net.layers)
    net = fold_batch_norms(net) if exported == "folded" else net
    data = TrainingData({net.inputs[0].name: images.inputs["x"]}, images.labels)
    got = finetune(net, data, FinetuneConfig(epochs=12 if name.startswith("resnext") else 4, batch=40, device="cpu", log=str(tmp_path / "log.csv")))
    losses = [float(row["loss"]) for row in csv.DictReader((tmp_path / "log.csv").read_text().splitlines())]
    assert all(map(math.isfinite, losses))
    assert losses[-1] < 0.8 * losses[0]
    assert [x.op for x in got.network.layers] == [x.op for x in net.layers]
    assert all(np.isfinite(t.array()).all() for t in got.network.constants.values() if t.dtype.is_float)
