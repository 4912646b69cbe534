"""Connected components against a plain graph search."""

import numpy as np
import pytest

from whet.pruning._components import find_components


def searched(n, edges):
    """The smallest node that each node can reach."""
    near = [[] for _ in range(n)]
    for a, b in edges:
        near[a].append(b)
        near[b].append(a)
    found = [-1] * n
    for start in range(n):
        if found[start] < 0:
            stack = [start]
            while stack:
                v = stack.pop()
                if found[v] < 0:
                    found[v] = start
                    stack += near[v]
    return found


@pytest.mark.parametrize("seed", range(30))
def test_components(seed):
    rng = np.random.default_rng(seed)
    n = int(rng.integers(1, 200))
    edges = rng.integers(0, n, (int(rng.integers(0, 2 * n)), 2))
    assert find_components(n, edges[:, 0], edges[:, 1]).tolist() == searched(n, edges.tolist())


def test_a_long_chain():
    at = np.random.default_rng(0).permutation(20000)
    assert set(find_components(20000, at[:-1], at[1:]).tolist()) == {0}
