"""PBQP against exhaustive enumeration, on small random graphs."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from whet.builder.select.pbqp import Problem


def brute_force(p: Problem) -> float:
    names = list(p.nodes)
    return min(p.total(dict(zip(names, c, strict=True))) for c in itertools.product(*(range(p.nodes[n].size) for n in names)))


def random_problem(seed: int, nodes: int, edges: list[tuple[int, int]], forbid: float = 0.0) -> Problem:
    rng, p = np.random.default_rng(seed), Problem()
    for i in range(nodes):
        p.add_node(i, rng.integers(0, 20, rng.integers(1, 4)))
    for a, b in edges:
        costs = rng.integers(0, 20, (p.nodes[a].size, p.nodes[b].size)).astype(float)
        costs[rng.random(costs.shape) < forbid] = np.inf
        p.add_edge(a, b, costs)
    return p


@settings(max_examples=150)
@given(st.integers(0, 10**6), st.integers(1, 7), st.floats(0, 0.4))
def test_trees_and_residual_graphs_are_solved_exactly(seed, nodes, forbid):
    rng = np.random.default_rng(seed)
    # A chain with one skip edge at a time over the last two nodes, as in residual networks: all reduced by R1 and R2.
    edges = [(i, i + 1) for i in range(nodes - 1)] + [(i, i + 2) for i in range(0, nodes - 2, 2) if rng.random() < 0.6]
    p = random_problem(seed, nodes, edges, forbid)
    found = p.solve()
    assert found.exact
    best = brute_force(p)
    assert found.cost == best or (np.isinf(found.cost) and np.isinf(best))


@settings(max_examples=80)
@given(st.integers(0, 10**6), st.integers(4, 7), st.floats(0, 0.3))
def test_a_beam_that_drops_nothing_is_exact(seed, nodes, forbid):
    p = random_problem(seed, nodes, list(itertools.combinations(range(nodes), 2)), forbid)
    found = p.solve()
    assert found.exact
    best = brute_force(p)
    assert found.cost == best or (np.isinf(found.cost) and np.isinf(best))
    assert np.isinf(best) or found.cost == p.total(found.picked)


def test_edges_between_the_same_nodes_add_up_in_either_direction():
    p = Problem()
    p.add_node("a", [0, 1])
    p.add_node("b", [5, 0, 2])
    there, back, loop = np.array([[1, 2, 3], [4, 5, 6]]), np.array([[0, 9], [7, 0], [0, 30]]), np.array([[8, 99], [99, 3]])
    p.add_edge("a", "b", there)
    p.add_edge("b", "a", back)
    p.add_edge("a", "b", there)
    p.add_edge("a", "a", loop)
    want = np.array([0, 1])[:, None] + np.array([5, 0, 2]) + 2 * there + back.T + np.diag(loop)[:, None]
    got = [[p.total({"a": a, "b": b}) for b in range(3)] for a in range(2)]
    assert got == want.tolist()
    assert p.solve().cost == want.min()


def several_options(seed, nodes=6):
    rng, p = np.random.default_rng(seed), Problem()
    for i in range(nodes):
        p.add_node(i, rng.integers(0, 20, 4))
    for a, b in itertools.combinations(range(nodes), 2):
        p.add_edge(a, b, rng.integers(0, 20, (4, 4)))
    return p


def test_a_small_beam_reports_a_heuristic_result_near_the_optimum():
    """The beam keeps three of up to 4 ** 5 partial choices; the beam and the look-ahead each win sometimes."""
    off, kept = [], set()
    for seed in range(40):
        p = several_options(seed)
        found, best = p.solve(width=3), brute_force(p)
        assert not found.exact
        assert best <= found.cost == p.total(found.picked) == min(cost for _, cost in found.tried)
        assert len(found.core) == 6
        off.append(found.cost / best)
        kept.add(found.tried[0][0])
    assert kept == {"beam of 3", "one step ahead"}
    assert np.mean(np.array(off) == 1.0) > 0.4
    assert max(off) < 1.4


def test_a_wider_beam_is_never_worse_than_looking_ahead_and_exact_when_wide_enough():
    for seed in range(10):
        p = several_options(seed)
        narrow, wide = p.solve(width=20), p.solve(width=4**6)
        assert narrow.cost <= dict(narrow.tried)["one step ahead"]
        assert wide.exact
        assert wide.cost == brute_force(p) <= narrow.cost


def test_the_beam_visits_nodes_in_an_order_of_small_frontiers():
    """A ladder of 30 rungs has a frontier of two or three nodes in any naming order."""
    rng, rungs = np.random.default_rng(0), 30
    p = Problem()
    for n in rng.permutation(3 * rungs):
        p.add_node(int(n), rng.integers(0, 20, 3))
    for i in range(rungs):
        for a, b in ((0, 1), (1, 2), (0, 2)):
            p.add_edge(3 * i + a, 3 * i + b, rng.integers(0, 20, (3, 3)))
        if i:
            for a in range(3):
                p.add_edge(3 * i - 3 + a, 3 * i + a, rng.integers(0, 20, (3, 3)))
    found = p.solve()
    assert found.exact
    assert len(found.core) > 60
    assert found.cost < p.solve(width=1).cost


def test_parallel_edges_add_up_and_an_edge_to_itself_joins_the_node():
    p = Problem()
    p.add_node("a", [0, 0])
    p.add_node("b", [0, 0])
    p.add_edge("a", "b", [[5, 0], [0, 5]])
    p.add_edge("b", "a", [[0, 9], [9, 0]])  # as seen from b: equal choices cost nothing, others 9
    p.add_edge("a", "a", [[1, 7], [7, 0]])
    found = p.solve()
    assert found.cost == 5
    assert found.picked == {"a": 1, "b": 1}


def test_a_problem_without_a_choice_costs_infinity():
    p = Problem()
    p.add_node("a", [1.0])
    p.add_node("b", [1.0])
    p.add_edge("a", "b", [[np.inf]])
    assert p.solve().cost == np.inf


def test_a_node_without_options_is_refused():
    with pytest.raises(AssertionError, match="no options"):
        Problem().add_node("a", [])
