"""2:4 masks: the largest two stay, ties are stable, layers are judged along the right axis."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from whet.network import parse_network
from whet.ops import run_network
from whet.sparsity import eligible_layers, force_two_four, is_two_four, two_four

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
def test_result_is_two_four_and_loses_least(seed, axis):
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


def test_force_changes_what_it_can_and_says_what_it_cannot():
    net = parse_network(NET)
    assert eligible_layers(net)[0] == []
    made, done, left = force_two_four(net)
    assert done == ["a"]
    assert list(left) == ["b"]
    assert "6 elements" in left["b"]
    assert eligible_layers(made)[0] == ["a"]
    assert eligible_layers(net)[0] == []  # the original stays
    x = np.random.default_rng(0).standard_normal((2, 8, 4, 4)).astype(np.float32)
    assert not np.allclose(run_network(net, {"x": x})["b"], run_network(made, {"x": x})["b"])
