"""The values of each kind of input that kernels are compared on, and what a kind is skipped for."""

import numpy as np
import pytest

from whet.builder.verify.input_kinds import KINDS, LARGE, make_values

TINY = np.finfo(np.float32).tiny
FLOATS = ("f4", "f2")
INTEGERS = ("i1", "u1")


def values(kind, dtype, magnitude=2.0, shape=(16, 25)):
    return make_values(kind, shape, np.dtype(dtype), magnitude, np.random.RandomState(3)).astype("f8")


@pytest.mark.parametrize("dtype", [*FLOATS, *INTEGERS])
def test_values_of_each_kind(dtype):
    magnitude = 2.0 if dtype in FLOATS else 90.0
    random = values("random", dtype, magnitude)
    assert 0.9 * magnitude < random.max() <= magnitude
    assert (random.min() < -0.9 * magnitude) == (dtype != "u1")
    assert (random.min() >= 0) == (dtype == "u1")
    assert not values("zero", dtype, magnitude).any()
    low = values("non-positive", dtype, magnitude)
    assert low.max() == 0
    assert (low.reshape(-1)[::5] == 0).all()
    assert (low < 0).mean() > 0.7 or dtype == "u1"
    constant = values("constant", dtype, magnitude)
    assert (constant == magnitude / 2).all()


def test_integers_reach_their_largest_values_and_no_further():
    for dtype, low, high in (("i1", -127, 127), ("u1", 0, 255)):
        a = values("random", dtype, magnitude=1000.0, shape=(400, 100))
        assert (a.min(), a.max()) == (low, high)
        assert np.array_equal(a, np.floor(a))
    assert abs(values("random", "i1", 5.0, (400, 100))).max() == 5


@pytest.mark.parametrize("dtype", FLOATS)
def test_kinds_of_floats_alone(dtype):
    denormal = values("denormal", dtype)
    small = np.abs(denormal) < (TINY if dtype == "f4" else 1e-4)
    assert 0.4 < small.mean() < 0.6
    assert (np.abs(denormal[~small]) <= 2).all()
    assert dtype == "f2" or (denormal[small] != 0).all()
    odd = values("not finite", dtype)
    assert np.isnan(odd).sum() >= 5
    assert np.isinf(odd).sum() >= 3
    assert np.isfinite(odd).mean() > 0.9
    large = values("large", "f4")
    assert 0.9 * 2 * LARGE < np.abs(large).max() <= 2 * LARGE


@pytest.mark.parametrize("dtype", [*FLOATS, *INTEGERS])
@pytest.mark.parametrize("shape", [(2, 8, 25), (64,)])
def test_mixed_values_have_every_kind_that_can_share_a_tensor(dtype, shape):
    magnitude = 3.0 if dtype in FLOATS else 90.0
    a = values("mixed", dtype, magnitude, shape).reshape(-1, shape[-1])
    parts = [a[part::8] if len(a) >= 8 else a[:, part::8] for part in range(8)]
    assert not parts[0].any()
    assert parts[2].max() <= 0 or dtype == "u1"
    np.testing.assert_allclose(parts[4], magnitude / 3, rtol=1e-3)
    if dtype == "f4":
        assert (0 < np.abs(parts[6])).all()
        assert (np.abs(parts[6]) < TINY).all()
    for k in (1, 3, 5, 7):
        assert np.abs(parts[k]).max() > 0.4 * magnitude


def test_a_layer_whose_actual_inputs_were_zero_gets_other_values():
    assert 2.5 < np.abs(values("random", "f4", magnitude=0.0)).max() <= 3.0
    assert set(KINDS) == {"mixed", "zero", "non-positive", "random", "constant", "large", "denormal", "not finite"}
