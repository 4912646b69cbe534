"""A training step as one CUDA graph: the same values as without, and the conditions for recording."""

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the extra 'train' is not installed: pip install torch==2.13.0")

from whet.network import Network, parse_type
from whet.training import FinetuneConfig, TrainingData, finetune
from whet.training.graphed import can_be_graphed
from whet.training.tuning import fold_batch_norms


def small(seed=0):
    rng = np.random.default_rng(seed)
    net = Network("small")
    x = net.add_input("x", parse_type("f32[N,3,8,8]"))
    weight = net.constant((0.3 * rng.standard_normal((8, 3, 3, 3))).astype(np.float32), "conv.weight")
    y = net.add("Conv", x, weight, pads=(1, 1, 1, 1))
    y = net.add("BatchNormalization", y, *(net.constant(np.full(8, v, np.float32), f"bn.{n}") for n, v in (("w", 1), ("b", 0), ("m", 0.1), ("v", 2))))
    y = net.add("Flatten", net.add("GlobalAveragePool", net.add("Relu", y)))
    head = net.constant((0.5 * rng.standard_normal((4, 8))).astype(np.float32), "fc.weight")
    net.mark_output(net.add("Gemm", y, head, transB=1), "out")
    return net


def data():
    rng = np.random.default_rng(1)
    labels = rng.integers(0, 4, 256)
    x = rng.standard_normal((256, 3, 8, 8)).astype(np.float32)
    x[np.arange(256), labels % 3] += labels[:, None, None]
    return TrainingData({"x": x}, labels)


@pytest.mark.parametrize(("device", "settings", "wanted"), [
    ("cpu", {}, False), ("cuda", {}, True), ("cuda", {"graph": False}, False), ("cuda", {"precision": "fp16"}, False),
    ("cuda", {"loss": "python:a:b"}, False), ("cuda", {"precision": "bf16", "loss": "mse"}, True),
])  # fmt: skip
def test_a_step_without_synchronization_is_recorded(device, settings, wanted):
    assert can_be_graphed(FinetuneConfig(**settings), torch.device(device)) is wanted


def test_a_folded_teacher_gives_the_same_outputs():
    net = small()
    x = torch.from_numpy(data().inputs["x"][:16])
    without = fold_batch_norms(net)
    assert "BatchNormalization" in [x.op for x in net.layers]
    assert "BatchNormalization" not in [x.op for x in without.layers]
    with torch.no_grad():
        assert torch.allclose(net.to_torch().eval()(x), without.to_torch().eval()(x), atol=1e-5)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device for PyTorch")
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_a_recorded_step_trains_as_an_unrecorded_one(optimizer):
    """Forty steps, kept masks, a teacher, a changing learning rate: the weights equal those of the plain loop."""
    torch.backends.cudnn.allow_tf32 = False
    how = {"epochs": 5, "batch": 32, "lr": 0.02, "optimizer": optimizer, "device": "cuda", "distill": 0.5, "augment": "flip", "seed": 3}
    plain, graphed = (finetune(small(), data(), FinetuneConfig(**how, graph=g), teacher=small(1)) for g in (False, True))
    assert plain.steps == graphed.steps == 40
    for name, t in plain.network.constants.items():
        assert np.allclose(t.array(), graphed.network.constants[name].array(), atol=2e-4), name
    assert not np.allclose(plain.network.constants["fc.weight"].array(), small().constants["fc.weight"].array(), atol=1e-3)
