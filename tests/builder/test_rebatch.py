"""A network with a fixed batch is calibrated and judged on samples of another batch."""

import numpy as np
import pytest

from whet import zoo
from whet.builder import BuildConfig
from whet.builder.batching.rebatch import match_batch, rebatch
from whet.builder.precision.calibration import Calibration, get_calibrated_ranges, prepare
from whet.errors import CalibrationError
from whet.frontends.onnx import network_from_onnx
from whet.network import Network, parse_type
from whet.ops import run_network
from whet.precision.data import split_samples

CONFIG = BuildConfig(backend="cpu", timing_cache="")


def attention(batch, mixes=False):
    """Self-attention of sequences with the batch in literal shapes, a part of a constant for each item, and a mask that is computed."""
    rng = np.random.default_rng(0)
    net = Network("attention")
    x = net.add_input("x", parse_type(f"f32[{batch},5,8]"))
    rows = net.add("Reshape", x, net.constant(np.array([batch * 5, 8])), name="rows")
    queries = net.add("MatMul", rows, net.constant(rng.standard_normal((8, 8)).astype("f4"), "w"), name="queries")
    heads = net.add("Reshape", queries, net.constant(np.array([batch, 5, 2, 4])), name="heads")
    heads = net.add("Transpose", heads, perm=(0, 2, 1, 3), name="by_head")
    mask = net.add("Relu", net.constant(rng.standard_normal((batch, 1, 5, 5)).astype("f4"), "mask"), name="masked")
    scores = net.add("Add", net.add("MatMul", heads, net.add("Transpose", heads, perm=(0, 1, 3, 2))), mask, name="scores")
    sums = net.add("ReduceSum", scores, net.constant(np.array([0 if mixes else 3])), keepdims=1, name="sums")
    net.mark_output(net.add("Add", sums, net.constant(rng.standard_normal((1 if mixes else batch, 2, 5, 1)).astype("f4"), "each")), "y")
    return net


@pytest.mark.parametrize("other", [1, 3, 6])
def test_results_are_those_of_the_items(other):
    net = attention(4)
    x = np.random.default_rng(1).standard_normal((4, 5, 8)).astype("f4")
    at = [i % 4 for i in range(other)]
    made = rebatch(net, 4, other)
    np.testing.assert_allclose(run_network(made, {"x": x[at]})["y"], run_network(net, {"x": x})["y"][at], rtol=1e-6)
    assert {layer.name for layer in net.layers} <= {layer.name for layer in made.layers}


def test_a_network_that_mixes_items_says_which_samples_it_needs():
    samples = [{"x": np.zeros((1, 5, 8), np.float32)}]
    with pytest.raises(CalibrationError, match="Give samples of 4"):
        match_batch(attention(4, mixes=True), samples)
    net = attention(4, mixes=True)
    assert match_batch(net, [{"x": np.zeros((4, 5, 8), np.float32)}]) is net


def test_ranges_do_not_depend_on_the_batch_of_the_samples():
    """Samples of one item for a network of batch 4 give the ranges of the network of batch 1."""
    values = np.random.default_rng(2).random((6, 1, 32, 32), np.float32)
    found = []
    for batch in (1, 4):
        net = network_from_onnx(zoo.build("lenet5", batch=batch))
        samples = [{net.inputs[0].name: v[None]} for v in values]
        ranges = get_calibrated_ranges(net, prepare(net, CONFIG), Calibration(lambda samples=samples: samples), CONFIG, pytest.fail)
        found.append({name: (r.low, r.high) for name, r in ranges.tensors.items()})
    assert found[0] == found[1]


def test_arrays_smaller_than_the_batch_are_samples_of_one_item():
    net = attention(4)
    assert [s["x"].shape for s in split_samples({"x": np.zeros((3, 5, 8), np.float32)}, net, "here")] == [(1, 5, 8)] * 3
    assert [s["x"].shape for s in split_samples({"x": np.zeros((9, 5, 8), np.float32)}, net, "here")] == [(4, 5, 8)] * 2
    with pytest.raises(CalibrationError, match="axis 2"):
        list(split_samples({"x": np.zeros((3, 5, 7), np.float32)}, net, "here"))
