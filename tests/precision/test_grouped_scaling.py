"""INT8 weight scales, and scale migration into grouped convolutions: exact values."""

import numpy as np
import pytest

from whet.network import Network, parse_type
from whet.ops import run_network
from whet.precision.insert import compute_weight_scales, fake_quantize_weights
from whet.precision.scaling import apply_scalings, make_reader_factors

RNG = np.random.default_rng(3)


def grouped_network(groups: int) -> Network:
    """A convolution, ReLU, and a convolution in groups of several channels each."""
    net = Network("grouped")
    x = net.add_input("x", parse_type("f32[2,3,6,6]"))
    first = net.constant(RNG.standard_normal((12, 3, 3, 3)).astype(np.float32), "w1")
    second = net.constant(RNG.standard_normal((8, 12 // groups, 3, 3)).astype(np.float32), "w2")
    a = net.add("Relu", net.add("Conv", x, first, pads=(1,) * 4, name="first"), name="relu")
    net.mark_output(net.add("Conv", a, second, group=groups, name="second"), "y")
    return net


def test_the_largest_weight_of_a_channel_becomes_127():
    net = grouped_network(1)
    layer = net.layers[0]
    w = layer.inputs[1].array()
    scales = compute_weight_scales(layer)
    steps = np.rint(w / scales[:, None, None, None])
    assert np.array_equal(np.abs(steps).max(axis=(1, 2, 3)), np.full(12, 127))
    assert np.abs(fake_quantize_weights(layer, w) - w).max() <= 0.51 * scales.max()


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_migrated_scales_leave_the_function_unchanged(groups):
    net = grouped_network(groups)
    relu = net.layers[1].output.name
    feeds = {"x": RNG.standard_normal((2, 3, 6, 6)).astype(np.float32)}
    scales = np.linspace(0.5, 3.0, 12).astype(np.float32)
    scaled = apply_scalings(net, {relu: scales})
    want, got = run_network(net, feeds)["y"], run_network(scaled, feeds)["y"]
    assert np.abs(got - want).max() < 1e-5 * np.abs(want).max()


def test_factors_of_a_grouped_reader_follow_its_groups():
    layer = grouped_network(2).layers[2]
    factors = make_reader_factors(layer, np.arange(12, dtype=np.float32))
    assert factors.shape == (8, 6, 1, 1)
    assert np.array_equal(factors[:4, :, 0, 0], np.tile(np.arange(6), (4, 1)))
    assert np.array_equal(factors[4:, :, 0, 0], np.tile(np.arange(6, 12), (4, 1)))
