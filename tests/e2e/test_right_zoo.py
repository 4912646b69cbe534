"""Networks of the zoo through `whet exec`, at optimization level 1; small real networks (test_right.py) at level 2."""

import numpy as np
import onnxruntime as ort
import pytest

from support.right import judged

ZOO = ["lenet5", "squeezenet1_1"]
BIG = ["mobilenet_v2", "resnet18", "resnet50", "yolov5s", "vit_b_16", "efficientnet_b0", "densenet121", "resnext50_32x4d", "mobilenet_v3_large"]


@pytest.mark.parametrize("name", [*ZOO, *(pytest.param(n, marks=pytest.mark.slow) for n in BIG)])
def test_a_zoo_network_is_accurate(name, tmp_path):
    from whet import zoo

    options = {"image": 128} if name == "mobilenet_v2" else {}  # a smaller image has the same layers
    path = zoo.save(name, tmp_path / f"{name}.onnx", batch=1, **options)
    session = ort.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    rng = np.random.default_rng(0)
    feeds = {i.name: rng.standard_normal(i.shape).astype(np.float32) for i in session.get_inputs()}
    judged(path, feeds, tmp_path, level=1)
