"""Beam search over the irreducible core of a PBQP: nodes are decided one by one, and the best partial assignments are kept.

The node order keeps the frontier small: the decided nodes with undecided neighbors. Partial assignments that agree on the frontier have the
same possible completions, so only the cheapest of them is kept. If their number never exceeds the beam width, the result is optimal (dynamic
programming over a path decomposition). Otherwise partial assignments are ranked by their cost plus a lower bound on the remaining cost.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from heapq import heapify, heappop, heappush

import numpy as np

Node = Hashable
Near = Mapping[Node, Mapping[Node, np.ndarray]]
"""near[a][b] is the cost matrix [options of a, options of b] of an edge, given from both ends."""

WIDTH = 1000


def search_beam(vectors: Mapping[Node, np.ndarray], near: Near, width: int = WIDTH) -> tuple[dict[Node, int], bool]:
    """The option per node, and True if the total is proven minimal. `vectors` has the costs of each node's options."""
    order = order_by_frontier(vectors, near)
    place = {n: i for i, n in enumerate(order)}
    ahead = {n: {o: _bound_remaining_cost(n, o, vectors, near) for o in near[n]} for n in order}
    costs = np.zeros(1)
    picks = np.zeros((1, len(order)), np.int16)
    frontier: list[int] = []
    least = True
    for at, node in enumerate(order):
        grown = costs[:, None] + vectors[node][None, :]
        for other, m in near[node].items():
            if place[other] < at:
                grown = grown + m.T[picks[:, place[other]]]
        states, options = grown.shape
        costs = grown.reshape(-1)
        picks = np.repeat(picks, options, axis=0)
        picks[:, at] = np.tile(np.arange(options, dtype=np.int16), states)
        frontier = [i for i in (*frontier, at) if any(place[o] > at for o in near[order[i]])]
        picks, costs = _drop_dominated(picks, costs, frontier)
        if costs.size > width:
            score = costs.copy()
            for i in frontier:
                score += sum((ahead[order[i]][o] for o in near[order[i]] if place[o] > at), np.zeros(vectors[order[i]].size))[picks[:, i]]
            kept = np.argsort(score, kind="stable")[:width]
            least = least and not np.isfinite(np.delete(score, kept)).any()
            picks, costs = picks[kept], costs[kept]
    best = int(np.argmin(costs))
    return {n: int(picks[best, i]) for i, n in enumerate(order)}, least


def _drop_dominated(picks: np.ndarray, costs: np.ndarray, frontier: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """The cheapest of the partial assignments that agree on the frontier, for each frontier; only those of finite cost if there are any."""
    if np.isfinite(costs).any():
        possible = np.isfinite(costs)
        picks, costs = picks[possible], costs[possible]
    by_cost = np.argsort(costs, kind="stable")
    picks, costs = picks[by_cost], costs[by_cost]
    if not frontier:
        return picks[:1], costs[:1]
    rows = np.ascontiguousarray(picks[:, frontier])
    _, first = np.unique(rows.view(np.dtype((np.void, rows.dtype.itemsize * rows.shape[1]))).reshape(-1), return_index=True)
    first.sort()
    return picks[first], costs[first]


def _bound_remaining_cost(node: Node, other: Node, vectors: Mapping[Node, np.ndarray], near: Near) -> np.ndarray:
    """For each option of `node`, a lower bound on the cost of its edge to `other` plus an equal share of that node's own cost."""
    return (near[node][other] + vectors[other][None, :] / len(near[other])).min(axis=1)


def order_by_frontier(vectors: Mapping[Node, np.ndarray], near: Near) -> list[Node]:
    """All nodes in greedy order: each next one minimizes the frontier."""
    nodes = list(vectors)
    rank = {n: i for i, n in enumerate(nodes)}
    open_edges = {n: len(near[n]) for n in nodes}
    closes = dict.fromkeys(nodes, 0)  # decided neighbors that leave the frontier when the node is decided
    touches: set[Node] = set()  # nodes with a decided neighbor
    left = set(nodes)

    def compute_growth(n: Node) -> tuple[int, int, int]:
        return (int(open_edges[n] > 0) - closes[n], -int(n in touches), rank[n])

    waiting = [compute_growth(n) for n in nodes]
    heapify(waiting)
    order: list[Node] = []
    while waiting:
        entry = heappop(waiting)
        node = nodes[entry[2]]
        if node not in left or entry != compute_growth(node):
            continue  # outdated: each change of a node's growth adds an entry
        left.discard(node)
        order.append(node)
        changed: set[Node] = set()
        for other in near[node]:
            open_edges[other] -= 1
            if other in left:
                touches.add(other)
                changed.add(other)
        for decided in (node, *near[node]):
            if decided not in left and open_edges[decided] == 1:
                last = next(o for o in near[decided] if o in left)
                closes[last] += 1
                changed.add(last)
        for n in changed:
            heappush(waiting, compute_growth(n))
    return order
