"""Lowered standard networks and real models keep their results and have the expected layers."""

import os
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from random_networks import feeds

from whet.frontends.onnx import network_from_onnx
from whet.network import verify
from whet.ops import run_network
from whet.passes import lower
from whet.zoo.making import build

sys.path.insert(0, str(Path(__file__).parents[1]))
from support import datasets
from support.python_calls import count_calls
from support.selection import with_slow_names

GOLDEN = Path(__file__).parents[1] / "golden" / "lowered_models.txt"
UPDATE = os.environ.get("WHET_UPDATE_GOLDEN") == "1"
ZOO = {
    "resnet18": ("resnet18", {"image": 64, "width": 32}),
    "resnet50": ("resnet50", {"image": 32, "width": 16}),
    "resnext50_32x4d": ("resnext50_32x4d", {"image": 32, "width": 32}),
    "mobilenet_v2": ("mobilenet_v2", {"image": 32}),
    "mobilenet_v3_large": ("mobilenet_v3_large", {"image": 32}),
    "mobilenet_v3_large opset 13": ("mobilenet_v3_large", {"image": 32, "opset": 13}),
    "efficientnet_b0": ("efficientnet_b0", {"image": 32}),
    "squeezenet1_1": ("squeezenet1_1", {"image": 64}),
    "densenet121": ("densenet121", {"image": 32, "blocks": (3, 4, 6, 4)}),
    "yolov5s": ("yolov5s", {"image": 64}),
    "lenet5": ("lenet5", {}),
    "vit_b_16": ("vit_b_16", {"layers": 2, "hidden": 96, "image": 32}),
    "vit_b_16 decomposed": ("vit_b_16", {"layers": 2, "hidden": 96, "image": 32, "decomposed_layer_norm": True}),
    "bert_base": ("bert_base", {"layers": 2, "hidden": 96}),
    "bert_base opset 13": ("bert_base", {"layers": 2, "hidden": 96, "opset": 13, "sequence": 7}),
}
REAL = (
    "cifar10/resnet20_cifar10.onnx",
    "cifar10/resnet8_mlperftiny.onnx",
    "coco_val128/vww_mobilenet025_96.onnx",
    "face/version-RFB-320.onnx",
    "face/version-slim-320.onnx",
    "imagenet_sample/squeezenet1.1.onnx",
    "imagenet_sample/mobilenetv2_backbone.onnx",
)  # those that the NumPy reference runs in a second or two


def _numbers_stay(net, low) -> None:
    """Error of the lowered network against float64: at most four times that of the source network, or 1e-5."""
    arrays = feeds(net, sizes={"N": 1, "sequence": 7})
    exact, before, after = run_network(net, arrays, widen=True), run_network(net, arrays), run_network(low, arrays)
    assert list(exact) == list(after)
    for key, want in exact.items():
        assert after[key].shape == want.shape
        scale = np.abs(want).max()
        limit = max(4 * np.abs(before[key] - want).max(), 1e-5 * scale)
        assert np.abs(after[key] - want).max() <= limit


def _summary(title: str, low) -> str:
    found = Counter(f"{layer.composite}+" if layer.op == "Fused" else layer.op for layer in low.layers)
    return f"{title}: " + ", ".join(f"{n} {op}" for op, n in sorted(found.items()))


@pytest.mark.parametrize("title", with_slow_names(ZOO, {"mobilenet_v3_large opset 13", "resnext50_32x4d", "yolov5s"}))
def test_zoo(title):
    name, how = ZOO[title]
    net = network_from_onnx(build(name, **how))
    low, _ = lower(net, check=True)
    verify(low)
    _numbers_stay(net, low)
    sources = {s for layer in net.layers for s in layer.sources}
    assert {s for layer in low.layers for s in layer.sources} <= sources
    lines = GOLDEN.read_text().splitlines() if GOLDEN.exists() else []
    got = _summary(title, low)
    if UPDATE:
        others = [x for x in lines if not x.startswith(f"{title}: ")]
        GOLDEN.write_text("\n".join(sorted([*others, got])) + "\n")
        lines = [got]
    assert got in lines


@pytest.mark.data
@pytest.mark.skipif(datasets.root() is None, reason="no shared data folder")
@pytest.mark.parametrize("name", REAL)
def test_real_models(name):
    net = network_from_onnx(datasets.path_of(name))
    low, _ = lower(net)
    verify(low)
    assert len(low.layers) < len(net.layers)
    _numbers_stay(net, low)


@pytest.mark.parametrize(("name", "options", "most"), [
    ("resnet50", {"width": 8}, 260_000), ("yolov5s", {"image": 64}, 450_000), ("vit_b_16", {"layers": 6, "hidden": 48, "image": 32}, 180_000),
])  # fmt: skip
def test_lowering_large_networks_is_quick(name, options, most):
    """Calls of Python functions, which do not depend on the machine: 1.5 times as many as in November 2026; a million of them take about a second."""
    net = network_from_onnx(build(name, **options))
    lower(net)  # caches are filled
    assert count_calls(lambda: lower(net)) < most
