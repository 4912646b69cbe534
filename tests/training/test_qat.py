"""Quantization-aware training: rounds at the positions of Q/DQ, exports the trained Q/DQ network, and the INT8 builder runs it."""

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the extra 'train' is not installed: pip install torch==2.13.0")

from test_finetune import FAST, digits_net

import whet
from support import datasets, realdata
from support.isa import VNNI
from whet.errors import TrainingError
from whet.network import Network, parse_type
from whet.ops import run_network
from whet.precision import Ranges, find_quantization_sites
from whet.precision.ranges import Range
from whet.training import FinetuneConfig, NetworkModule, TrainingData, accuracy, finetune, train_quantization_aware
from whet.training.qat import FakeActivation, FakeWeight, make_fakes
from whet.training.tuning import fold_batch_norms


@pytest.fixture(scope="module")
def digits():
    found = pytest.importorskip("sklearn.datasets").load_digits()
    x = (found.images[:, None] / 16).astype(np.float32)
    return TrainingData({"x": x[:1200]}, found.target[:1200].astype(np.int64)), TrainingData({"x": x[1200:]}, found.target[1200:].astype(np.int64))


@pytest.fixture(scope="module")
def learned(digits):
    return finetune(digits_net(), digits[0], FinetuneConfig(**FAST)).network


@pytest.mark.parametrize("range_", [Range(-1.0, 1.0), Range(0.0, 2.0), Range(-0.3, 2.2)], ids=["signed", "unsigned", "skewed"])
def test_rounding_equals_the_reference(range_):
    x = np.random.default_rng(0).uniform(-3, 3, (4, 50)).astype(np.float32)
    how = FakeActivation(range_, learn=True)
    np.testing.assert_allclose(how(torch.from_numpy(x)).detach().numpy(), range_.fake_quantize(x), rtol=1e-6, atol=1e-6)
    again = how.range()
    assert (again.low, again.high) == pytest.approx((range_.zero * -float(range_.scale) if range_.low != -range_.high else range_.low,
                                                     again.high), abs=1e-6)
    assert (again.zero, again.dtype) == (range_.zero, range_.dtype)
    assert float(again.scale) == pytest.approx(float(range_.scale), rel=1e-6)


def test_gradients_are_straight_through_and_zero_at_saturation():
    how = FakeActivation(Range(-1.0, 1.0), learn=True)
    x = torch.tensor([-5.0, -0.5, 0.21, 5.0], requires_grad=True)
    how(x).sum().backward()
    assert x.grad.tolist() == [0, 1, 1, 0]
    assert how.grown.grad is not None
    w = torch.randn(3, 5, generator=torch.Generator().manual_seed(0)).requires_grad_()
    FakeWeight(0)(w).sum().backward()
    assert w.grad.tolist() == [[1.0] * 5] * 3


def test_the_module_equals_the_exported_network(learned, digits):
    got = train_quantization_aware(learned, digits[0], FinetuneConfig(**{**FAST, "epochs": 1, "lr": 0.005}), samples=64, test=digits[1])
    ops = [x.op for x in got.network.layers]
    places = find_quantization_sites(fold_batch_norms(learned))
    assert ops.count("QuantizeLinear") == len(places.roots)
    assert ops.count("DequantizeLinear") == len(places.roots) + len(places.layers) == 3 + 3
    module = NetworkModule(got.floating, fakes=make_fakes(find_quantization_sites(got.floating), got.ranges, False)[0]).eval()
    x = digits[1].inputs["x"][:50]
    with torch.no_grad():
        trained = module(torch.from_numpy(x)).numpy()
    want = run_network(got.network, {"x": x})["out"]
    step = float(max(r.scale for r in got.ranges.tensors.values()))
    assert np.abs(trained - want).max() < 3 * step  # another order of accumulation may round one value differently
    assert np.median(np.abs(trained - want)) < 1e-5
    assert got.training.accuracy > 0.9
    assert accuracy(module, digits[1]) == pytest.approx(got.training.accuracy, abs=0.01)


def test_training_recovers_the_loss_by_poor_ranges(learned, digits):
    """Ranges four times too small: calibration loses much accuracy, training with them recovers most of it."""
    made = fold_batch_norms(learned)
    places = find_quantization_sites(made)
    watched: dict[str, float] = {}
    run_network(made, {"x": digits[0].inputs["x"][:100]}, watch=lambda t, a: watched.__setitem__(t.name, float(np.abs(a).max())))
    watched["x"] = 1.0
    poor = Ranges({t.name: Range(0.0, watched[t.name] / 8) for t in places.roots})
    quantized = NetworkModule(made, fakes=make_fakes(places, poor, False)[0])
    before = accuracy(quantized, digits[1])
    config = FinetuneConfig(**{**FAST, "epochs": 2, "lr": 0.02}, distill=0.5)
    got = train_quantization_aware(learned, digits[0], config, ranges=poor, learn_ranges=False, test=digits[1])
    assert got.ranges.tensors["x"].high == pytest.approx(poor.tensors["x"].high, rel=1e-5)
    assert got.training.accuracy > before + 0.02
    learning = train_quantization_aware(learned, digits[0], config, ranges=poor, test=digits[1])
    assert learning.ranges.tensors["x"].high > 1.02 * poor.tensors["x"].high  # training increases the scales
    assert learning.training.accuracy > before + 0.02


@VNNI
def test_the_cpu_builder_runs_it_in_integers_with_zeros_kept(learned, digits):
    sparse = finetune(learned, digits[0], FinetuneConfig(**{**FAST, "epochs": 1, "lr": 0.01}, masks="2:4")).network
    config = FinetuneConfig(**{**FAST, "epochs": 1, "lr": 0.002}, masks="2:4")
    got = train_quantization_aware(sparse, digits[0], config, samples=64, test=digits[1])
    shapes = {"x": (1, 1, 8, 8)}
    config = whet.BuildConfig(threads=1, precisions=("int8",), profiles=((shapes, shapes, shapes),), optimization_level=1)
    plan = whet.builder.build(got.network, config)
    from whet.sparsity import list_eligible_layers
    from whet.tactics import is_quantized

    assert sum(is_quantized(x) for x in plan.network.layers) == 3
    assert len(list_eligible_layers(plan.network)[0]) == 2  # 2:4 is preserved by rounding
    with whet.Runtime(backend="cpu", threads=1).load(plan).create_context() as context:
        guesses = [int(context.run({"x": x[None]})["out"].argmax()) for x in digits[1].inputs["x"]]
    assert float((np.array(guesses) == digits[1].labels).mean()) == pytest.approx(got.training.accuracy, abs=0.02)


def test_layers_can_stay_in_floating_point(learned, digits):
    got = train_quantization_aware(learned, digits[0], FinetuneConfig(**{**FAST, "epochs": 0.2}), samples=16, skip=["gemm"])
    assert [x.op for x in got.network.layers].count("DequantizeLinear") == 4
    net = Network("nothing")
    net.mark_output(net.add("Relu", net.add_input("x", parse_type("f32[N,1,8,8]"))))
    with pytest.raises(TrainingError, match="no quantizable layer"):
        train_quantization_aware(net, digits[0])


@pytest.mark.data
def test_a_real_cifar_network_keeps_its_accuracy():
    model, = realdata.models(["resnet8_mlperftiny"])
    net = whet.network_from_onnx(model.path)
    with np.load(datasets.path_of("cifar10/cifar10_lossless.npz")) as f:
        x, y = (f["x_train"][:300].astype(np.float32).transpose(0, 3, 1, 2).copy(), f["y_train"][:300].astype(np.int64))
        tx, ty = f["x_test"][:200].astype(np.float32).transpose(0, 3, 1, 2).copy(), f["y_test"][:200].astype(np.int64)
    test = TrainingData({"input": tx}, ty)
    config = FinetuneConfig(epochs=1, batch=50, optimizer="adamw", lr=2e-5, weight_decay=0, warmup=0, distill=0.9, device="cpu")
    got = train_quantization_aware(net, TrainingData({"input": x}, y), config, samples=20, test=test)
    assert got.network.layers[-1].op == "Softmax"
    assert got.training.accuracy > accuracy(net, test) - 0.03
