"""The order of columns for 2:4 masks: planted orders are found, nothing is lost, time limits."""

from itertools import permutations

import numpy as np
import pytest

from whet.sparsity.permutation import compute_kept_sum, find_best_order


def test_the_kept_sum_is_that_of_the_two_largest_of_each_four():
    scores = np.random.default_rng(0).random((7, 12)).astype("f4")
    expected = np.sort(scores.reshape(7, 3, 4), axis=-1)[..., 2:].sum()
    assert compute_kept_sum(scores) == pytest.approx(expected, rel=1e-6)


def test_a_planted_order_is_found():
    """Columns of which half are zero in each row, in an order where all nonzeros fit, then shuffled: the search loses nothing."""
    rng = np.random.default_rng(1)
    planted = rng.random((64, 8, 4)).astype("f4") + 0.1
    planted[:, :, 2:] = 0  # two columns of each stripe are zero
    shuffled = planted.reshape(64, 32)[:, np.argsort(np.arange(32) % 4, kind="stable")]  # the nonzero columns are adjacent now
    assert compute_kept_sum(shuffled) < 0.8 * shuffled.sum()
    order = find_best_order(shuffled, 60)
    assert sorted(order) == list(range(32))
    assert compute_kept_sum(shuffled[:, order]) == pytest.approx(float(shuffled.sum()), rel=1e-6)


def test_two_stripes_have_the_best_of_all_orders():
    scores = np.random.default_rng(2).random((5, 8)).astype("f4") ** 4
    best = max(compute_kept_sum(scores[:, [0, *rest]]) for rest in permutations(range(1, 8)))
    assert compute_kept_sum(scores[:, find_best_order(scores, 60)]) == pytest.approx(best, rel=1e-6)


def test_the_search_is_repeatable_and_ends_with_the_time():
    scores = np.random.default_rng(3).random((40, 64)).astype("f4")
    np.testing.assert_array_equal(find_best_order(scores, 60), find_best_order(scores, 60))
    assert compute_kept_sum(scores[:, find_best_order(scores, 60)]) > 1.005 * compute_kept_sum(scores)
    np.testing.assert_array_equal(find_best_order(scores, 0), np.arange(64))
    wide = np.random.default_rng(4).random((2000, 512)).astype("f4")
    partial = find_best_order(wide, 0.3)
    assert compute_kept_sum(wide[:, partial]) > compute_kept_sum(wide)
    assert (partial.reshape(-1, 4) != np.arange(512).reshape(-1, 4)).any(1)[64:].any(), "not only the first groups of four"
    ticks = []
    find_best_order(scores[:, :16], 60, lambda: ticks.append(1))
    assert len(ticks) >= 6  # the pairs of four stripes
