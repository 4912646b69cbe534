"""Layers with arrays on the host: by kernels for the sizes of each run, where NumPy is slow, with the results of the reference."""

import numpy as np
import pytest

from whet.errors import NetworkError
from whet.network import F32, I64, Network, TensorType, make_symbol, parse_type
from whet.ops import run_layer
from whet.tactics import get_tactic, host_layers, load_tactic
from whet.tactics.cpu._llvm import jit
from whet.tactics.host_layers import HostLayers

if jit.why_unavailable():
    pytest.skip(jit.why_unavailable() or "", allow_module_level=True)
RNG = np.random.default_rng(7)


def make_boxes(count, spread=640.0):
    centers, sizes = RNG.uniform(0, spread, (count, 2)), RNG.uniform(8, 160, (count, 2))
    return np.concatenate((centers - sizes / 2, centers + sizes / 2), 1).astype(np.float32)


def make_suppression(samples, classes, count, centered=0):
    """A NonMaxSuppression layer with all inputs; the sizes of its boxes are symbols."""
    net = Network("net", "source")
    types = [("boxes", TensorType(F32, (samples, make_symbol("n"), 4))), ("scores", TensorType(F32, (samples, classes, make_symbol("n"))))]
    inputs = [net.add_input(n, t) for n, t in (*types, ("most", TensorType(I64, (1,))), *((n, TensorType(F32, (1,))) for n in ("iou", "least")))]
    return net.add_layer("NonMaxSuppression", inputs, {"center_point_box": centered})


@pytest.fixture
def no_numpy(monkeypatch):
    """NumPy computes no layer."""

    def fail(layer, *_):
        raise AssertionError(f"{layer.op} ran in NumPy")

    monkeypatch.setattr(host_layers, "run_layer", fail)


@pytest.mark.parametrize("samples", [1, 2])
@pytest.mark.parametrize("classes", [1, 3])
@pytest.mark.parametrize("centered", [0, 1])
def test_boxes_are_those_of_the_reference(samples, classes, centered, no_numpy):
    host, layer = HostLayers(), make_suppression(samples, classes, 0, centered)
    for count, limit, iou, least in ((1, 5, 0.5, 0.0), (15, 100, 0.0, 0.3), (16, 16, 0.3, -1.0), (700, 33, 0.45, 0.5), (700, 2**62, 0.6, 0.0)):
        boxes = np.stack([make_boxes(count) for _ in range(samples)])
        scores = np.round(RNG.random((samples, classes, count)), 1).astype(np.float32)  # with equal ones
        arrays = [boxes, scores, np.array([limit]), np.array([iou], np.float32), np.array([least], np.float32)]
        (got,) = host.compute(layer, arrays, {"n": count})
        (want,) = run_layer(layer, arrays, {"n": count})
        assert got.dtype == np.int64
        np.testing.assert_array_equal(got, want)


def test_scores_of_all_kinds_are_in_order(no_numpy):
    layer = make_suppression(1, 1, 0)
    scores = np.array([0.0, np.nan, -0.0, np.inf, -np.inf, -1e-40, 3.0, -2.5, 1e-40, np.nan, 7.0], np.float32)
    boxes = np.arange(11, dtype=np.float32).reshape(1, 11, 1) * 10 + np.array([0, 0, 1, 1], np.float32)
    arrays = [boxes, scores.reshape(1, 1, -1), np.array([11]), np.array([0.5], np.float32), np.array([-np.inf], np.float32)]
    (got,) = HostLayers().compute(layer, arrays, {"n": 11})
    np.testing.assert_array_equal(got[:, 2], [3, 10, 6, 8, 0, 2, 5, 7])  # -inf is not above the threshold, NaN is above none


def test_nothing_is_selected():
    layer = make_suppression(1, 1, 0)
    for count, limit in ((4, 0), (4, -3), (0, 5)):
        arrays = [np.ones((1, count, 4), "f4"), np.ones((1, 1, count), "f4"), np.array([limit]), np.float32([0.5]), np.float32([0])]
        (got,) = HostLayers().compute(layer, arrays, {"n": count})
        assert got.shape == (0, 3)


def test_values_that_the_op_refuses_are_reported_by_it():
    layer = make_suppression(1, 1, 0)
    arrays = [np.ones((1, 4, 4), "f4"), np.ones((1, 1, 4), "f4"), np.array([1, 2]), np.float32([0.5]), np.float32([0])]
    with pytest.raises(NetworkError, match="NonMaxSuppression"):
        HostLayers().compute(layer, arrays, {"n": 4})


def test_a_convolution_is_computed_for_each_number_of_boxes():
    net = Network("net", "source")
    x = net.add_input("x", TensorType(F32, (make_symbol("n"), 32, 14, 14)))
    weights = net.constant(RNG.standard_normal((32, 32, 3, 3)).astype(np.float32), "w")
    layer = net.add_layer("Conv", [x, weights], {"pads": (1, 1, 1, 1)})
    host = HostLayers()
    for count in (1, 3, 2, 3):
        a = RNG.standard_normal((count, 32, 14, 14)).astype(np.float32)
        (got,) = host.compute(layer, [a, weights.array()], {"n": count})
        (want,) = run_layer(layer, [a, weights.array()])
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)
    load_tactic("cpu/onednn_conv")
    if get_tactic("cpu/onednn_conv").missing_library() is None:
        assert host.kernels == 3


def test_two_layers_with_weights_of_one_shape_have_their_own():
    net, host = Network("net", "source"), HostLayers()
    x = net.add_input("x", parse_type("f32[64,256]"))
    a = RNG.standard_normal((64, 256)).astype(np.float32)
    for _ in range(2):
        weights = net.constant(RNG.standard_normal((256, 256)).astype(np.float32))
        layer = net.add_layer("MatMul", [x, weights])
        (got,) = host.compute(layer, [a, weights.array()], {})
        np.testing.assert_allclose(got, a @ weights.array(), rtol=1e-4, atol=1e-4)


def test_unaligned_and_strided_arrays_are_taken():
    net = Network("net", "source")
    x, y = (net.add_input(n, parse_type("f32[128,128]")) for n in "xy")
    layer = net.add_layer("MatMul", [x, y])
    host = HostLayers()
    for a in (RNG.standard_normal((128, 128)).astype("f4").T, RNG.standard_normal(128 * 128 + 1).astype("f4")[1:].reshape(128, 128)):
        (got,) = host.compute(layer, [a, a], {})
        np.testing.assert_allclose(got, a @ a, rtol=1e-4, atol=1e-4)


def test_small_layers_run_in_numpy_and_keep_their_results():
    net = Network("net", "source")
    x = net.add_input("x", parse_type("f32[40,40]"))
    layer, host = net.add_layer("Sigmoid", [x]), HostLayers()
    a = RNG.standard_normal((40, 40)).astype(np.float32)
    np.testing.assert_array_equal(host.compute(layer, [a], {})[0], run_layer(layer, [a])[0])
    assert host.kernels == 0
