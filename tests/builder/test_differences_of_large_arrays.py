"""Errors of arrays that are compared in blocks: as by their definition, and with NaN, infinities and overflows in any block."""

import numpy as np
import pytest

from whet.builder.verify.differences import compute_relative_error

COUNT = 50_001


def draw(dtype):
    rng = np.random.default_rng(0)
    ref = rng.standard_normal(COUNT) * np.exp2(rng.integers(-10, 3, COUNT))
    return (ref + 1e-3 * rng.standard_normal(COUNT)).astype(dtype), ref


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_the_error_is_that_of_the_whole_array(dtype):
    got, ref = draw(dtype)
    e = got.astype(np.float64) - ref
    want = max(np.linalg.norm(e) / np.linalg.norm(ref), np.abs(e).max() / np.abs(ref).max())
    assert compute_relative_error(got.reshape(3, -1), ref.reshape(3, -1)) == (pytest.approx(want, rel=1e-12), "")
    assert compute_relative_error(got, ref, 1e3) == (pytest.approx(np.abs(e).max() / 1e3, rel=1e-12), "")


@pytest.mark.parametrize("at", [0, COUNT // 2, COUNT - 1])
def test_one_wrong_value_is_found_in_any_block(at):
    got, ref = draw(np.float32)
    got[at] = ref[at] + 100
    assert compute_relative_error(got, ref)[0] > 1
    for odd in (np.nan, np.inf, -np.inf):
        got[at] = odd
        assert compute_relative_error(got, ref) == (np.inf, "NaN or infinite values in other places than the reference")


@pytest.mark.parametrize("at", [0, COUNT // 2, COUNT - 1])
def test_values_that_are_not_finite_in_both_do_not_count(at):
    got, ref = draw(np.float16)
    before = compute_relative_error(got, ref)[0]
    for value, odd in ((np.nan, np.nan), (np.inf, np.inf), (1e6, np.inf)):  # 1e6 overflows in float16
        ref[at], got[at] = value, odd
        error, why = compute_relative_error(got, ref)
        assert why == ""
        assert error == pytest.approx(before, rel=0.01)
    assert compute_relative_error(np.full(COUNT, np.nan, np.float32), np.full(COUNT, np.nan)) == (0.0, "")
