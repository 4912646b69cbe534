"""Batch norms inserted for the training: the same function before, folded after, trained where the folded network diverges, left out elsewhere."""

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the extra 'train' is not installed: pip install torch==2.13.0")

from whet.network import Network, parse_type
from whet.training import FinetuneConfig, TrainingData, accuracy, finetune
from whet.training.batch_norms import SMALLEST_BATCH, fold_weights, insert_batch_norms, list_foldable
from whet.training.module import with_weights
from whet.training.tuning import fold_batch_norms

CPU = torch.device("cpu")


def weights_of(net):
    return {n: t.array() for n, t in net.constants.items()}


def test_the_network_with_batch_norms_computes_the_same_and_folds_back(learned, digits):
    exported = fold_batch_norms(learned.network)
    assert not any(x.op == "BatchNormalization" for x in exported.layers)
    made, inserted = insert_batch_norms(exported, digits[0], batch=64, device=CPU)
    assert [x.op for x in made.layers].count("BatchNormalization") == len(inserted) == 2
    x = torch.from_numpy(digits[1].inputs["x"][:50])
    with torch.no_grad():
        torch.testing.assert_close(made.to_torch().eval()(x), exported.to_torch().eval()(x), rtol=1e-4, atol=1e-4)
    back = with_weights(exported, fold_weights(made.to_torch().weights(), inserted))
    for name, array in weights_of(exported).items():
        np.testing.assert_allclose(weights_of(back)[name], array, rtol=1e-4, atol=1e-6)


def test_statistics_are_those_of_the_data(learned, digits):
    made, _ = insert_batch_norms(fold_batch_norms(learned.network), digits[0], batch=64, device=CPU)
    module = made.to_torch()
    x = torch.from_numpy(digits[0].inputs["x"][np.linspace(0, len(digits[0]) - 1, 1024).astype(int)])
    with torch.no_grad():
        module.eval()
        want = module(x)
        module.train()
        torch.testing.assert_close(module(x), want, rtol=1e-3, atol=1e-3)


def test_training_gives_a_network_of_the_same_structure(learned, digits):
    exported = fold_batch_norms(learned.network)
    got = finetune(exported, digits[0], FinetuneConfig(epochs=2, batch=60, lr=0.05, device="cpu"), test=digits[1])
    assert got.inserted == 2
    assert [x.op for x in got.network.layers] == [x.op for x in exported.layers]
    assert weights_of(got.network).keys() == weights_of(exported).keys()
    assert got.accuracy == accuracy(got.network, digits[1]) > 0.85
    kept = finetune(exported, digits[0], FinetuneConfig(epochs=1, batch=60, device="cpu", batch_norms="keep"))
    assert kept.inserted == 0


def conv_net(after="Relu", bias=True, outputs="end"):
    net = Network("n")
    x = net.add_input("x", parse_type("f32[N,3,8,8]"))
    rng = np.random.default_rng(0)
    w, b = net.constant(rng.standard_normal((4, 3, 3, 3)).astype(np.float32), "w"), net.constant(np.ones(4, np.float32), "b")
    y = net.add("Conv", x, w, *([b] if bias else []), pads=(1, 1, 1, 1))
    if after == "BatchNormalization":
        z = net.add(after, y, *(net.constant(np.ones(4, np.float32), f"bn{i}") for i in range(4)))
    elif after == "InstanceNormalization":
        z = net.add(after, y, *(net.constant(np.ones(4, np.float32), f"in{i}") for i in range(2)))
    else:
        z = net.add(after, y)
    net.mark_output(z, "z")
    if outputs == "both":
        net.mark_output(y, "y")
    return net


@pytest.mark.parametrize(
    ("how", "freeze", "count"),
    [
        ({}, (), 1),
        ({"after": "BatchNormalization"}, (), 0),  # it has one
        ({"after": "InstanceNormalization"}, (), 0),  # it is normalized otherwise
        ({"bias": False}, (), 0),  # nothing can have been folded
        ({"outputs": "both"}, (), 0),  # a head
        ({}, ("w",), 0),  # a batch norm would scale the frozen filters
    ],
)  # fmt: skip
def test_batch_norms_are_inserted_where_one_may_have_been(how, freeze, count):
    assert len(list_foldable(conv_net(**how), freeze)) == count


def test_small_batches_have_no_statistics():
    data = TrainingData({"x": np.random.default_rng(0).standard_normal((40, 3, 8, 8)).astype(np.float32)})
    assert insert_batch_norms(conv_net(), data, batch=SMALLEST_BATCH, device=CPU)[1]
    assert insert_batch_norms(conv_net(), data, batch=SMALLEST_BATCH - 1, device=CPU)[1] == []


def test_a_dead_filter_and_a_constant_channel_stay_finite():
    net = conv_net()
    from whet.network import Weight

    dead = net.constants["w"].array().copy()
    dead[1] = 0
    net.constants["w"].weight = Weight(dead)
    data = TrainingData({"x": np.random.default_rng(0).standard_normal((64, 3, 8, 8)).astype(np.float32)})
    made, inserted = insert_batch_norms(net, data, batch=32, device=CPU)
    back = with_weights(net, fold_weights(made.to_torch().weights(), inserted))
    np.testing.assert_allclose(back.constants["w"].array(), dead, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(back.constants["b"].array(), 1, rtol=1e-5)
