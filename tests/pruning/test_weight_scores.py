"""Scores of single weights: gradients against PyTorch, second order against the measured error, missing data."""

import numpy as np
import pytest

from whet.errors import PruneError
from whet.network import Network, parse_type
from whet.ops import run_network
from whet.pruning import apply_pattern
from whet.pruning.sensitivity import compute_mean_absolute_gradients
from whet.pruning.weight_scores import WeightScores
from whet.sparsity import find_reduction_axis, parse_pattern


@pytest.fixture(scope="module")
def net():
    """A strided convolution, one in two groups, a transposed and a plain product."""
    rng = np.random.default_rng(0)
    made = Network("n", "source")

    def weight(name, *shape):
        return made.constant(rng.standard_normal(shape).astype("f4") / np.float32(np.sqrt(np.prod(shape[1:]))), name)

    x = made.add_input("x", parse_type("f32[N,4,6,6]"))
    a = made.add("Relu", made.add("Conv", x, weight("w1", 8, 4, 3, 3), pads=(1,) * 4, strides=(2, 2), name="first"))
    b = made.add("Relu", made.add("Conv", a, weight("w2", 8, 4, 1, 1), group=2, name="grouped"))
    c = made.add("Gemm", made.add("Flatten", b), weight("w3", 12, 72), transB=1, alpha=0.5, name="wide")
    made.mark_output(made.add("MatMul", c, weight("w4", 12, 5), name="last"), "y")
    return made


@pytest.fixture(scope="module")
def data():
    return {"x": np.random.default_rng(1).standard_normal((256, 4, 6, 6)).astype("f4")}


def weighted(net):
    return {x.name: x for x in net.layers if find_reduction_axis(x) is not None}


def test_gradients_are_those_of_pytorch(net, data):
    torch = pytest.importorskip("torch")
    from whet.training import NetworkModule

    labels = np.random.default_rng(2).integers(0, 5, 20)
    found = compute_mean_absolute_gradients(net, weighted(net), {"x": data["x"][:20]}, labels, batch=8)
    module = NetworkModule(net)
    total: dict[str, np.ndarray] = {}
    for i in range(20):
        module.zero_grad()
        torch.nn.functional.cross_entropy(module(torch.from_numpy(data["x"][i : i + 1])), torch.from_numpy(labels[i : i + 1])).backward()
        for name, w in module.weights().items():
            total[name] = total.get(name, 0) + np.abs(w.grad.numpy()) / 20
    for layer, w in (("first", "w1"), ("grouped", "w2"), ("wide", "w3"), ("last", "w4")):
        np.testing.assert_allclose(found[layer], total[w], rtol=1e-3, atol=1e-5, err_msg=layer)


@pytest.mark.parametrize("layer", ["first", "wide"])
def test_second_order_scores_are_the_error_after_the_other_weights_adjust(net, data, layer):
    """The score of one weight against the least-squares error of its output channel without this weight, solved directly."""
    scores = WeightScores.of(net, weighted(net), "second_order", data, None, 0)
    w, axis = find_reduction_axis(weighted(net)[layer])
    got = scores(layer, w.array(), axis)
    moments = scores.inputs[layer].gram[0] / scores.inputs[layer].rows
    moments = moments + 1e-3 * np.trace(moments) / len(moments) * np.eye(len(moments))
    flat, row = w.array().reshape(len(w.array()), -1).astype("f8"), 3
    for i in (0, 5, 17):
        rest = np.delete(np.arange(flat.shape[1]), i)
        change = np.zeros(flat.shape[1])
        change[i] = -flat[row, i]
        change[rest] = -np.linalg.solve(moments[np.ix_(rest, rest)], moments[rest, i] * change[i])
        assert got.reshape(flat.shape)[row, i] == pytest.approx(0.5 * change @ moments @ change, rel=1e-6)


@pytest.mark.parametrize("kind", ["l1", "activation", "second_order", "taylor1"])
def test_each_kind_gives_2_4_weights_and_data_lower_the_error(net, data, kind):
    def error(pruned):
        return np.linalg.norm(run_network(pruned, data)["y"] - run_network(net, data)["y"])

    done = apply_pattern(net, parse_pattern("2:4", 0), data, importance=kind)
    assert set(done.two_four) == {"first", "grouped", "wide", "last"}
    assert error(done.network) < error(apply_pattern(net, parse_pattern("2:4", 0)).network)


def test_the_kinds_differ_and_unknown_ones_are_named(net, data):
    masks = {k: apply_pattern(net, parse_pattern("2:4", 0), data, importance=k).masks["w3"] for k in ("l1", "activation", "second_order", "taylor1")}
    assert len({m.tobytes() for m in masks.values()}) == 4
    with pytest.raises(PruneError, match="measured on data"):
        apply_pattern(net, parse_pattern("2:4", 0), importance="taylor1")
    with pytest.raises(PruneError, match=r"not 'taylor'.*taylor1"):
        apply_pattern(net, parse_pattern("2:4", 0), data, importance="taylor")
