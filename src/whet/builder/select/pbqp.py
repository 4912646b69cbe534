"""Partitioned Boolean quadratic problems: pick one option per node so that node costs plus edge costs are least.

Nodes of degree 0, 1 and 2 are eliminated exactly (R0, R1, R2, after Scholz and Eckstein, LCTES 2002), which solves series-parallel graphs, as
most networks are. If nodes of higher degree remain (the core), the cheaper result of two methods is used: beam search over the core
(builder/select/beam.py), which may prove its result minimal, and the RN heuristic, which fixes the node with the most edges by its local
minimum. A local search then changes single nodes.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from heapq import heapify, heappop, heappush

import numpy as np

from whet.builder.select.beam import WIDTH, search_beam

Node = Hashable


@dataclass(frozen=True)
class Solution:
    """The option picked per node and the total cost; `exact`: it is proven minimal. `core` are the nodes that did not reduce, `tried` the methods
    used for the core with their totals, the best first."""

    picked: dict[Node, int]
    cost: float
    exact: bool = True
    core: tuple[Node, ...] = ()
    tried: tuple[tuple[str, float], ...] = ()


class Problem:
    """Nodes with cost vectors, undirected edges with cost matrices. Costs are not negative; infinity forbids."""

    def __init__(self) -> None:
        self.nodes: dict[Node, np.ndarray] = {}
        self.edges: dict[tuple[Node, Node], np.ndarray] = {}

    def add_node(self, node: Node, costs) -> None:
        """A node with one cost per option (at least one option)."""
        vector = np.asarray(costs, np.float64)
        assert vector.size, f"node {node} has no options"
        self.nodes[node] = vector

    def add_edge(self, a: Node, b: Node, costs) -> None:
        """Costs [options of a, options of b]; edges between the same nodes add up, one from a node to itself joins its costs."""
        matrix = np.asarray(costs, np.float64)
        assert matrix.shape == (self.nodes[a].size, self.nodes[b].size), f"edge {a}-{b} has shape {matrix.shape}"
        if a == b:
            self.nodes[a] = self.nodes[a] + np.diagonal(matrix)
        elif (b, a) in self.edges:
            self.edges[b, a] = self.edges[b, a] + matrix.T
        else:
            self.edges[a, b] = self.edges[a, b] + matrix if (a, b) in self.edges else matrix

    def total(self, picked: dict[Node, int]) -> float:
        """The cost of a full choice."""
        cost = sum(float(v[picked[n]]) for n, v in self.nodes.items())
        return cost + sum(float(m[picked[a], picked[b]]) for (a, b), m in self.edges.items())

    def solve(self, width: int = WIDTH) -> Solution:
        """The optimal assignment, or a good one if the graph does not reduce. An infinite cost means that there is none."""
        reduced = _Reduction(self)
        core = reduced.reduce()
        if not core:
            picked = reduced.back_substitute({})
            return Solution(picked, self.total(picked))
        nodes = tuple(n for n in self.nodes if n in core)
        found, least = search_beam({n: reduced.vectors[n] for n in nodes}, {n: reduced.near[n] for n in nodes}, width)
        heuristic = _Reduction(self)
        results = [("frontier search" if least else f"beam of {width}", reduced.back_substitute(found))]
        if not least:
            results = [(what, self._improve(picked)) for what, picked in (*results, ("one step ahead", heuristic.run()))]
        tried = sorted(((what, self.total(picked), picked) for what, picked in results), key=lambda w: w[1])
        return Solution(tried[0][2], tried[0][1], least, nodes, tuple((what, cost) for what, cost, _ in tried))

    def _improve(self, picked: dict[Node, int]) -> dict[Node, int]:
        """Changes single nodes while that lowers the total."""
        near: dict[Node, list[tuple[Node, np.ndarray]]] = {n: [] for n in self.nodes}
        for (a, b), m in self.edges.items():
            near[a].append((b, m))
            near[b].append((a, m.T))
        for _ in range(20):
            changed = False
            for n, vector in self.nodes.items():
                costs = vector + sum((m[:, picked[other]] for other, m in near[n]), np.zeros(vector.size))
                best = int(np.argmin(costs))
                if costs[best] < costs[picked[n]]:
                    picked[n], changed = best, True
            if not changed:
                break
        return picked


class _Reduction:
    """Eliminates nodes in order of degree, then of insertion. Degrees never grow, so heaps with outdated entries find the next node."""

    def __init__(self, problem: Problem):
        self.nodes = list(problem.nodes)
        self.order = {n: i for i, n in enumerate(self.nodes)}
        self.left = set(self.nodes)
        self.vectors = {n: v.copy() for n, v in problem.nodes.items()}
        self.near: dict[Node, dict[Node, np.ndarray]] = {n: {} for n in problem.nodes}  # near[a][b] is [options of a, options of b]
        for (a, b), m in problem.edges.items():
            self.near[a][b], self.near[b][a] = m, m.T
        self.undo: list[tuple[Node, Callable[[dict[Node, int]], int]]] = []
        self._reducible = [(len(self.near[n]), i) for i, n in enumerate(self.nodes) if len(self.near[n]) <= 2]
        heapify(self._reducible)

    def reduce(self) -> set[Node]:
        """Eliminates nodes of degree 0 to 2 until there are none; returns the remaining nodes."""
        while self._reducible:
            degree, i = heappop(self._reducible)
            node = self.nodes[i]
            if node in self.left and len(self.near[node]) == degree:
                self.left.discard(node)
                (self._reduce_r0, self._reduce_r1, self._reduce_r2)[degree](node)
        return self.left

    def run(self) -> dict[Node, int]:
        """An assignment of all nodes; RN is applied when no node reduces."""
        self.reduce()
        by_degree = [(-len(self.near[n]), self.order[n]) for n in self.left]
        heapify(by_degree)
        while self.left:
            degree, i = heappop(by_degree)
            node = self.nodes[i]
            if node not in self.left:
                continue
            if len(self.near[node]) != -degree:
                heappush(by_degree, (-len(self.near[node]), i))
                continue
            self.left.discard(node)
            self._reduce_rn(node)
            self.reduce()
        return self.back_substitute({})

    def back_substitute(self, picked: dict[Node, int]) -> dict[Node, int]:
        """Extends an assignment of the remaining nodes by the eliminated nodes, in reverse order."""
        for node, choose in reversed(self.undo):
            picked[node] = choose(picked)
        return picked

    def _drop(self, node: Node) -> None:
        for other in self.near[node]:
            del self.near[other][node]
            self._offer(other)
        self.near[node] = {}

    def _offer(self, node: Node) -> None:
        """Adds a node of reduced degree to the heap of reducible nodes."""
        if len(self.near[node]) <= 2:
            heappush(self._reducible, (len(self.near[node]), self.order[node]))

    def _reduce_r0(self, node: Node) -> None:
        best = int(np.argmin(self.vectors[node]))
        self.undo.append((node, lambda picked: best))

    def _reduce_r1(self, node: Node) -> None:
        ((other, m),) = self.near[node].items()
        costs = self.vectors[node][:, None] + m
        self.vectors[other] = self.vectors[other] + costs.min(axis=0)
        best = costs.argmin(axis=0)
        self._drop(node)
        self.undo.append((node, lambda picked: int(best[picked[other]])))

    def _reduce_r2(self, node: Node) -> None:
        (a, ma), (b, mb) = self.near[node].items()
        costs = self.vectors[node][:, None, None] + ma[:, :, None] + mb[:, None, :]
        joined, best = costs.min(axis=0), costs.argmin(axis=0)
        self._drop(node)
        if b in self.near[a]:
            joined = joined + self.near[a][b]
        self.near[a][b], self.near[b][a] = joined, joined.T
        self._offer(a)
        self._offer(b)
        self.undo.append((node, lambda picked: int(best[picked[a], picked[b]])))

    def _reduce_rn(self, node: Node) -> None:
        costs = self.vectors[node].copy()
        for other, m in self.near[node].items():
            costs = costs + (m + self.vectors[other][None, :]).min(axis=1)
        best = int(np.argmin(costs))
        for other, m in self.near[node].items():
            self.vectors[other] = self.vectors[other] + m[best]
        self._drop(node)
        self.undo.append((node, lambda picked: best))
