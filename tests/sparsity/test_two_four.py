"""2:4 masks: the two largest values are kept, ties are stable, layers are judged along their reduction axis."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from whet.network import Weight, parse_network
from whet.ops import run_network
from whet.pruning import zero_smallest
from whet.sparsity import find_reduction_axis, force_two_four, is_two_four, list_eligible_layers, two_four
from whet.sparsity.report import Zeros, count_zeros, describe_two_four, describe_zero_channels, describe_zeros, measure_scattered_zeros

NET = """network n source
in %x: f32[2,8,4,4]
const %w: f32[6,8,3,3] = seed(1)
const %v: f32[5,6,1,1] = seed(2)
%a = Conv(%x, %w, pads=(1, 1, 1, 1)) from "conv1"
%b = Conv(%a, %v) from "conv2"
out %b
"""


def test_keeps_the_two_largest_of_four():
    w = np.array([[1.0, -4.0, 3.0, 2.0], [0.0, 0.0, 0.0, 5.0], [2.0, 2.0, 2.0, 2.0]], np.float32)
    assert two_four(w, 1).tolist() == [[0, -4, 3, 0], [0, 0, 0, 5], [2, 2, 0, 0]]


@given(st.integers(0, 10**6), st.integers(0, 2))
def test_the_result_is_two_four_with_minimal_loss(seed, axis):
    w = np.random.default_rng(seed).standard_normal((4, 8, 4))
    got = two_four(w, axis)
    assert is_two_four(got, axis)
    assert np.count_nonzero(got) == w.size // 2
    kept = np.moveaxis(got, axis, -1).reshape(-1, 4)
    all_ = np.moveaxis(w, axis, -1).reshape(-1, 4)
    assert np.allclose(np.abs(kept).sum(1), np.sort(np.abs(all_), 1)[:, 2:].sum(1))


def test_an_axis_of_six_is_refused():
    with pytest.raises(ValueError, match="multiple of 4"):
        two_four(np.ones((6, 6)), 1)
    assert not is_two_four(np.zeros((6, 6)), 1)


def test_force_changes_eligible_layers_and_names_the_others():
    net = parse_network(NET)
    assert list_eligible_layers(net)[0] == []
    made, done, left = force_two_four(net)
    assert done == ["a"]
    assert list(left) == ["b"]
    assert "6 elements" in left["b"]
    assert list_eligible_layers(made)[0] == ["a"]
    assert list_eligible_layers(net)[0] == []  # the source network is unchanged
    x = np.random.default_rng(0).standard_normal((2, 8, 4, 4)).astype(np.float32)
    assert not np.allclose(run_network(net, {"x": x})["b"], run_network(made, {"x": x})["b"])


def test_only_zeros_without_a_pattern_are_reported():
    net = parse_network(NET)
    assert measure_scattered_zeros(net) == 0
    assert describe_zeros(net) is None
    scattered = zero_smallest(net, 0.5)
    assert measure_scattered_zeros(scattered) == pytest.approx(0.5, abs=0.02)
    assert "50% of the weights are zeros in no pattern (unstructured pruning): no kernel here skips" in describe_zeros(scattered)
    fours = force_two_four(net)[0]
    assert measure_scattered_zeros(fours) == 0  # the other weight has no zeros
    whole = net.clone()
    w = whole.constants["w"].array().copy()
    w[:3] = 0  # all-zero filters are excluded
    whole.constants["w"].weight = Weight(w, whole.constants["w"].weight.origin)
    assert measure_scattered_zeros(whole) == 0


def test_two_four_weights_without_their_kernels_are_named():
    net = parse_network("network n source\nin %x: f32[2,8]\nconst %w: f32[8,4] = seed(3)\n%y = MatMul(%x, %w)\nout %y\n")
    assert describe_two_four(net) is None
    assert describe_two_four(force_two_four(net)[0]) == "1 layers have 2:4 weights; --sparsity=enable permits the kernels that exploit them."


def test_products_are_judged_along_their_reduction_axes():
    net = parse_network("""network n source
in %x: f32[2,8]
const %w: f32[8,4] = seed(1)
%a = MatMul(%x, %w)
out %a
""")
    w = net.constants["w"].array().copy()
    w[:, :2] = 0  # two outputs
    net.constants["w"].weight = Weight(w, net.constants["w"].weight.origin)
    assert measure_scattered_zeros(net) == 0
    w = w.copy()
    w[:3, 2] = 0
    w[5, 3] = 0
    net.constants["w"].weight = Weight(w, net.constants["w"].weight.origin)
    assert measure_scattered_zeros(net) == 4 / 32


def test_quantized_weights_of_a_fused_layer_are_judged_by_their_integers():
    """The integer 0 is a zero; the layer's weights are the i8 ones, whose scales are separate inputs."""
    net = parse_network("""network n lowered
in %x: f32[2,8,4,4]
const %w: i8[6,8,1,1] = seed(1)
const %s: f32[] = seed(2)
%y: f32[2,6,4,4] = Fused(%x, %w, %s, composite="Conv") {
  region body
    in %a: f32[2,8,4,4]
    in %b: i8[6,8,1,1]
    in %c: f32[]
    %d: f32[6,8,1,1] = DequantizeLinear(%b, %c)
    %e: f32[2,6,4,4] = Conv(%a, %d)
    out %e
}
out %y
""")
    (layer,) = net.layers
    w, axis = find_reduction_axis(layer)
    assert (w.name, axis) == ("w", 1)
    whole = np.arange(1, 49).reshape(6, 8, 1, 1)
    w.weight = Weight(whole.astype(np.int8), w.constant().origin)
    assert list_eligible_layers(net) == ([], {"y": "its weights are not 2:4"})
    w.weight = Weight(two_four(whole.astype(np.float32), 1).astype(np.int8), w.constant().origin)
    assert list_eligible_layers(net) == (["y"], {})


def test_wholly_zero_channels_are_counted_as_channels_and_not_as_scattered_zeros():
    net = parse_network("""network n source
in %x: f32[1,8,4,4]
const %w: f32[16,8,3,3] = seed(1)
const %d: f32[16,1,3,3] = seed(2)
%a = Conv(%x, %w, pads=(1,1,1,1))
%b = Conv(%a, %d, group=16, pads=(1,1,1,1))
out %b
""")
    assert count_zeros(net) == Zeros(0.0, 0, 16 + 8 + 16, 0.0)
    w, d = (net.constants[n].array().copy() for n in ("w", "d"))
    w[:3], w[:, 5:7], d[4] = 0, 0, 0  # three outputs, two inputs, one filter of a depthwise convolution
    for name, values in (("w", w), ("d", d)):
        net.constants[name].weight = Weight(values, net.constants[name].weight.origin)
    found = count_zeros(net)
    assert (found.scattered, found.channels) == (0.0, 3 + 2 + 1)
    assert found.channel_share == pytest.approx((3 * 72 + 13 * 18 + 9) / (w.size + d.size))
    assert describe_zero_channels(net).startswith("6 of 40 input and output channels of weights are wholly zero")


def test_ties_and_nan_are_ordered_as_by_a_stable_sort():
    rng = np.random.default_rng(0)
    w = rng.integers(-2, 3, (64, 32)).astype(np.float32)
    w[rng.random(w.shape) < 0.1] = np.nan
    w[rng.random(w.shape) < 0.1] = np.inf
    fours = w.reshape(64, 8, 4)
    order = np.argsort(-np.abs(fours), axis=-1, kind="stable")
    keep = np.zeros(fours.shape, bool)
    np.put_along_axis(keep, order[..., :2], True, axis=-1)
    np.testing.assert_array_equal(two_four(w, 1), np.where(keep, fours, 0).reshape(w.shape))
