"""Sums of tables: the minimum by variable elimination equals exhaustive search; minimizing tables in parts gives a lower bound."""

from itertools import product

import numpy as np
import pytest

from whet.pruning.elimination import Elimination


def tables(seed, variables=6, count=8):
    """Random sizes, scopes of one to three variables, values."""
    rng = np.random.default_rng(seed)
    sizes = [int(n) for n in rng.integers(2, 5, variables)]
    scopes = [(v,) for v in range(variables)]
    scopes += [tuple(sorted(int(v) for v in rng.choice(variables, int(rng.integers(2, 4)), replace=False))) for _ in range(count)]
    return sizes, scopes, [rng.standard_normal([sizes[v] for v in s]) for s in scopes]


def value(scopes, numbers, x):
    return sum(float(t[tuple(x[v] for v in s)]) for s, t in zip(scopes, numbers, strict=True))


@pytest.mark.parametrize("seed", range(8))
def test_the_minimum_is_exact(seed):
    sizes, scopes, numbers = tables(seed)
    least = min(value(scopes, numbers, x) for x in product(*(range(n) for n in sizes)))
    plan = Elimination(sizes, scopes)
    swept = plan.run(numbers)
    assert plan.exact
    assert swept.least == pytest.approx(least)
    assert value(scopes, numbers, swept.values()) == pytest.approx(least)


@pytest.mark.parametrize("seed", range(8))
def test_minimizing_in_parts_gives_a_lower_bound(seed):
    sizes, scopes, numbers = tables(seed)
    least = min(value(scopes, numbers, x) for x in product(*(range(n) for n in sizes)))
    plan = Elimination(sizes, scopes, most=30)
    swept = plan.run(numbers)
    assert not plan.exact
    assert swept.least <= least + 1e-9
    assert value(scopes, numbers, swept.values()) >= least - 1e-9


@pytest.mark.parametrize("most", [30, 1 << 19])
def test_regrets_add_up_to_the_value(most):
    """For any backtracking path, minimum + regrets is the sum at those values, or a lower bound of it."""
    sizes, scopes, numbers = tables(3)
    plan = Elimination(sizes, scopes, most)
    swept = plan.run(numbers)
    for x in np.random.default_rng(0).integers(0, 2, (20, len(sizes))).tolist():
        total = swept.least + sum(float(swept.regrets(n, x)[x[plan.order[-1 - n]]]) for n in range(len(sizes)))
        assert total == pytest.approx(value(scopes, numbers, x))
        assert all((swept.regrets(n, x) >= -1e-12).all() for n in range(len(sizes)))


def test_ties_select_the_first():
    assert Elimination([3], [(0,)]).run([np.zeros(3)]).values() == [0]
