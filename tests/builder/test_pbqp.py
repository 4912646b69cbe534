"""PBQP: against trying every choice, on random small graphs."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from whet.builder.pbqp import Problem


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


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 7), st.floats(0, 0.4))
def test_trees_and_residual_graphs_are_solved_exactly(seed, nodes, forbid):
    rng = np.random.default_rng(seed)
    # A chain with one skip edge at a time over the last two nodes: what residual networks look like, all reduced by R1 and R2.
    edges = [(i, i + 1) for i in range(nodes - 1)] + [(i, i + 2) for i in range(0, nodes - 2, 2) if rng.random() < 0.6]
    p = random_problem(seed, nodes, edges, forbid)
    found = p.solve()
    assert found.exact
    best = brute_force(p)
    assert found.cost == best or (np.isinf(found.cost) and np.isinf(best))


@settings(max_examples=80, deadline=None)
@given(st.integers(0, 10**6), st.integers(4, 6))
def test_dense_graphs_are_never_below_the_best_and_say_that_they_guessed(seed, nodes):
    p = random_problem(seed, nodes, list(itertools.combinations(range(nodes), 2)))
    found = p.solve()
    assert not found.exact
    assert found.cost >= brute_force(p)
    assert found.cost == p.total(found.picked)


def test_dense_graphs_come_near_the_best():
    off = []
    for seed in range(60):
        p = random_problem(seed, 6, list(itertools.combinations(range(6), 2)))
        off.append(p.solve().cost / brute_force(p))
    assert np.mean(np.array(off) == 1.0) > 0.5
    assert max(off) < 1.5


def test_parallel_edges_add_up_and_an_edge_to_itself_joins_the_node():
    p = Problem()
    p.add_node("a", [0, 0])
    p.add_node("b", [0, 0])
    p.add_edge("a", "b", [[5, 0], [0, 5]])
    p.add_edge("b", "a", [[0, 9], [9, 0]])  # seen from b: equal choices cost nothing here, 9 otherwise
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
