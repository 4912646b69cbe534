"""Networks that take a fixed batch, as PyTorch exports them by default, are trained with larger batches and keep their own."""

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the extra 'train' is not installed: pip install torch==2.13.0")

from whet.errors import NetworkError, TrainingError
from whet.network import parse_network
from whet.ops import run_network
from whet.training import FinetuneConfig, TrainingData, finetune
from whet.training.free_batch import copy_with_dynamic_batch, free_batch

CPU = torch.device("cpu")
TRANSFORMER = """network n source
in %x: f32[1,3,8,8]
const %w: f32[8,3,4,4] = seed(1)
const %b: f32[8] = seed(2)
const %token: f32[1,1,8] = seed(3)
const %qkv: f32[8,24] = seed(4)
const %out: f32[8,8] = seed(5)
const %head: f32[8,3] = seed(6)
const %flat: i64[3] = [1, 8, -1]
const %split: i64[5] = [1, 5, 3, 2, 4]
const %heads: i64[3] = [2, 5, 4]
const %back: i64[3] = [5, 1, 8]
const %first: i64[1] = [1]
const %zero: i64[] = [0]
const %one: i64[] = [1]
const %two: i64[] = [2]
%c = Conv(%x, %w, %b, strides=(4, 4))
%f = Reshape(%c, %flat)
%t = Transpose(%f, perm=(0, 2, 1))
%k = Concat(%token, %t, axis=1)
%m = MatMul(%k, %qkv)
%r = Reshape(%m, %split)
%p = Transpose(%r, perm=(2, 0, 3, 1, 4))
%qq = Gather(%p, %zero, axis=0)
%kk = Gather(%p, %one, axis=0)
%vv = Gather(%p, %two, axis=0)
%q = Reshape(%qq, %heads)
%key = Reshape(%kk, %heads)
%v = Reshape(%vv, %heads)
%kt = Transpose(%key, perm=(0, 2, 1))
%s = MatMul(%q, %kt)
%a = Softmax(%s, axis=-1)
%o = MatMul(%a, %v)
%ot = Transpose(%o, perm=(1, 0, 2))
%ob = Reshape(%ot, %back)
%oo = Transpose(%ob, perm=(1, 0, 2))
%pr = MatMul(%oo, %out)
%res = Add(%k, %pr)
%cls = Gather(%res, %zero, axis=1)
%y = MatMul(%cls, %head)
out %y
"""
RESIZED = """network n source
in %x: f32[2,3,4,4]
const %w: f32[3,3,1,1] = seed(1)
const %sizes: i64[4] = [2, 3, 8, 8]
const %shape: i64[4] = [2, 3, 8, 8]
%c = Conv(%x, %w)
%r = Resize(%c, none, none, %sizes, mode="nearest")
%m = ReduceMean(%c, axes=(2, 3), keepdims=1)
%e = Expand(%m, %shape)
%y = Add(%r, %e)
out %y
"""


def random_data(net, count, seed=0):
    t = net.inputs[0]
    return {t.name: np.random.default_rng(seed).standard_normal((count, *t.shape[1:])).astype(np.float32)}


@pytest.mark.parametrize("text", [TRANSFORMER, RESIZED], ids=["class token and heads", "resized"])
def test_the_copy_computes_each_sample_as_the_network_does(text):
    net = parse_network(text)
    made = copy_with_dynamic_batch(net)
    only, data = net.inputs[0].shape[0], random_data(net, 6)
    want = np.concatenate([run_network(net, {"x": data["x"][i : i + only]})["y"] for i in range(0, 6, only)])
    np.testing.assert_allclose(run_network(made, data)["y"], want, rtol=1e-5, atol=1e-6)
    assert [x.name for x in net.layers] == [x.name for x in made.layers if x.name in {y.name for y in net.layers}]


def test_an_export_with_a_fixed_batch_is_trained_with_larger_ones():
    net = parse_network(TRANSFORMER)
    labels = np.arange(60) % 3
    x = random_data(net, 3)["x"][labels] + 0.1 * random_data(net, 60, 1)["x"]
    data = TrainingData({"x": x}, labels)
    done = finetune(net, data, FinetuneConfig(epochs=8, batch=20, optimizer="adamw", lr=1e-2, device="cpu"), test=data)
    assert done.network.inputs[0].shape == net.inputs[0].shape
    assert [str(x) for x in done.network.layers] == [str(x) for x in net.layers]
    right = [int(run_network(done.network, {"x": x[i : i + 1]})["y"].argmax()) == labels[i] for i in range(60)]
    assert np.mean(right) == pytest.approx(done.accuracy)
    assert np.mean(right) > 0.9


def test_networks_that_take_the_batch_stay_as_they_are():
    net = parse_network(TRANSFORMER)
    data = TrainingData(random_data(net, 8))
    assert free_batch(net, data, 1, CPU) is net
    dynamic = parse_network("network n source\nin %x: f32[N,3]\n%y = Relu(%x)\nout %y")
    assert free_batch(dynamic, TrainingData({"x": np.ones((8, 3), np.float32)}), 4, CPU) is dynamic


@pytest.mark.parametrize(
    ("layers", "why"),
    [
        ("%m = ReduceMean(%x, axes=(0,), keepdims=1)\n%y = Sub(%x, %m)", "the samples of a batch change each other's output 'y'"),
        ("%y = ReduceMean(%x, axes=(0,), keepdims=0)", "the output 'y' does not have the samples along its first axis"),
        ("%p = Transpose(%x, perm=(1, 0))\n%m = MatMul(%p, %u)\n%y = Transpose(%m, perm=(1, 0))", ""),
    ],
)
def test_networks_that_mix_samples_say_so(layers, why):
    net = parse_network(f"network n source\nin %x: f32[2,3]\nconst %u: f32[2,2] = seed(1)\n{layers}\nout %y")
    with pytest.raises(TrainingError, match="'n' takes batches of exactly 2, and other numbers of samples are not computed alike") as e:
        free_batch(net, TrainingData(random_data(net, 8)), 4, CPU)
    assert why in str(e.value)
    assert isinstance(e.value.__cause__, NetworkError | RuntimeError)


def test_a_teacher_with_a_fixed_batch_is_asked_for_larger_ones():
    net = parse_network(TRANSFORMER)
    data = TrainingData(random_data(net, 40))
    config = FinetuneConfig(epochs=1, batch=20, optimizer="adamw", lr=1e-9, distill=1.0, batch_norms="keep", device="cpu")
    assert finetune(net, data, config, teacher=net).history[0]["loss"] == pytest.approx(0, abs=1e-3)


def test_shapes_that_passes_have_made_attributes_are_adapted_too():
    net = parse_network("network n source\nin %x: f32[1,2,6]\n%y = Reshape(%x, shape=(1, 4, 3))\nout %y")
    made = copy_with_dynamic_batch(net)
    assert made.layers[0].attrs["shape"] == (-1, 4, 3)
    assert str(made.outputs[0].type) == "f32[batch,4,3]"
