"""Build time grows with the network's size as n log n: operations are counted for a size and for four times that size.

Linear growth gives a ratio of 4, n log n about 5, quadratic growth 16.
"""

import numpy as np
import pytest

from support.operations import count_opcodes
from whet.backends import get_backend
from whet.builder.memory.free_ranges import FreeRanges
from whet.builder.memory.planner import Block, Use, list_overlaps, plan_memory
from whet.builder.select.beam import order_by_frontier
from whet.builder.select.pbqp import Problem
from whet.engine.intersections import Rectangle, list_intersections
from whet.network import Network, parse_type
from whet.rewrite import Graph, run_passes
from whet.tactics import list_tactics

LIMIT = 7.0


def growth(work, size: int) -> float:
    """Operations for 4 * `size` relative to `size`; `work(n)` prepares a task of size n and returns it as a function."""
    for task in (work(size), work(size)):  # the second time without imports and caches to fill
        small = count_opcodes(task)
    return count_opcodes(work(4 * size)) / small


def chain(n: int, in_place: bool = False) -> list[Use]:
    pairs = ((0, 0),) if in_place else ()
    return [Use(f"l{i}", ((f"v{i}", 100),), ((f"v{i + 1}", 100),), () if i in (0, n - 1) else pairs) for i in range(n)]


def wide(n: int) -> list[Use]:
    """n layers read one tensor, and the last layer reads all their outputs."""
    parts = [Use(f"l{i}", (("x", 100),), ((f"p{i}", 64 * (i % 7 + 1)),)) for i in range(n)]
    return [*parts, Use("cat", tuple(u.outputs[0] for u in parts), (("y", 64),))]


@pytest.mark.parametrize("uses", [chain, lambda n: chain(n, True), wide], ids=["chain", "in place", "wide"])
def test_memory_planning(uses, monkeypatch):
    monkeypatch.setattr("whet.builder.memory.planner.OVERLAPS", 0)  # small enough that the wide network exceeds the limit
    monkeypatch.setattr("whet.builder.memory.planner.OVERLAPS_PER_BLOCK", 8)

    def work(n):
        listed = uses(n)
        inputs = {"x" if uses is wide else "v0": 100}
        return lambda: plan_memory(listed, inputs, ["y" if uses is wide else f"v{n}"])

    assert growth(work, 60) < LIMIT


def wide_network(n: int, kind: str) -> Network:
    """n layers that read the same input, and a Concat of their outputs."""
    net = Network("wide")
    x = net.add_input("x", parse_type("f32[1,8,4,4]"))
    parts = []
    for i in range(n):
        w = net.constant(np.full((1, 8, 1, 1), i + 1, np.float32), "w") if kind == "convolutions" else None
        parts.append(net.add("Sigmoid", x) if w is None else net.add("Relu", net.add("Conv", x, w)))
    net.mark_output(net.add("Concat", *parts, axis=1))
    return net


@pytest.mark.parametrize("kind", ["equal layers", "convolutions"])
def test_passes_over_wide_networks(kind):
    def work(n):
        net = wide_network(n, kind)
        return lambda: run_passes(net)

    assert growth(work, 40) < LIMIT


def test_later_readers_come_in_order_without_removed_ones():
    net = wide_network(4, "equal layers")
    g = Graph(net)
    first, second, third, fourth = net.layers[:4]
    x = net.inputs[0]
    assert list(g.later_readers(x, first)) == [second, third, fourth]
    g.replace(second.output, third.output, g.position(second))
    g.remove([second])
    assert list(g.later_readers(x, first)) == [third, fourth]
    added = g.add("Relu", x).maker
    assert list(g.later_readers(x, first)) == [third, fourth], "a new layer has no position yet"
    g.set_position(added, g.position(third) + 0.5)
    assert list(g.later_readers(x, first)) == [third, added, fourth]
    assert list(g.later_readers(x, fourth)) == []


@pytest.mark.parametrize("name", ["cpu/onednn_split", "cpu/part_view"])
def test_planning_a_split_into_many_parts(name):
    tactic, backend = next(t for t in list_tactics("cpu") if t.name == name), get_backend("cpu")
    if tactic.missing_library():
        pytest.skip("oneDNN is not installed")

    def work(n):
        net = Network("split")
        net.add("Split", net.add_input("x", parse_type(f"f32[{n},16]")), axis=0, num_outputs=n)
        (layer,) = net.layers
        signature = tactic.signatures(layer, backend)[0]
        return lambda: tactic.plan(layer, signature, (), backend)

    assert growth(work, 20) < LIMIT


def test_reducing_and_ordering_a_problem():
    def problem(n: int, step: int) -> Problem:
        p = Problem()
        for i in range(n):
            p.add_node(i, [1.0, 2.0])
        for i in range(n - 1):
            p.add_edge(i, i + 1, [[0.0, 1.0], [1.0, 0.0]])
        if step:  # a ladder with crossings: no node has a degree below 3, so that nothing reduces
            for i in range(n):
                p.add_edge(i, (i + step) % n, [[0.0, 1.0], [1.0, 0.0]])
        return p

    def solve(n):
        p = problem(n, 0)
        return p.solve

    def order(n):
        p = problem(n, 7)
        near = {i: {} for i in range(n)}
        for (a, b), m in p.edges.items():
            near[a][b], near[b][a] = m, m.T
        return lambda: order_by_frontier(p.nodes, near)

    assert growth(solve, 50) < LIMIT
    assert growth(order, 100) < LIMIT


@pytest.mark.parametrize("kind", ["bytes", "steps", "both"])
def test_intersections_of_disjoint_rectangles(kind):
    def work(n):
        at_once = [Rectangle(f"a{i}", 64 * i, 64 * i + 64, 0, n) for i in range(n)] if kind != "steps" else []
        in_turn = [Rectangle(f"b{i}", 0, 64 * n, n + 1 + i, n + 1 + i) for i in range(n)] if kind != "bytes" else []
        return lambda: list(list_intersections([*at_once, *in_turn]))

    assert work(30)() == []
    assert growth(work, 60) < LIMIT


def test_intersections_are_those_of_all_pairs():
    rng = np.random.default_rng(0)
    for _ in range(200):
        made = []
        for i in range(int(rng.integers(1, 25))):
            at, first = (int(v) for v in rng.integers(-1, 20, 2))
            made.append(Rectangle(f"r{i}", at, at + int(rng.integers(0, 9)), first, first + int(rng.integers(0, 9))))
        expected = {
            frozenset((a.name, b.name)) for a in made for b in made
            if a is not b and max(a.at, b.at) < min(a.end, b.end) and max(a.first, b.first) <= min(a.last, b.last) and a.end > a.at and b.end > b.at
        }  # fmt: skip
        assert {frozenset((a.name, b.name)) for a, b in list_intersections(made)} == expected


def test_free_ranges_are_merged_and_the_tightest_is_taken():
    free = FreeRanges()
    a, b, c, d = (free.take(n) for n in (64, 128, 64, 192))
    assert (a, b, c, d, free.end) == (0, 64, 192, 256, 448)
    free.release(a, 64)
    free.release(c, 64)
    assert free.take(64) == 0  # the lowest of equal ranges
    free.release(0, 64)
    free.release(b, 128)  # 0 to 256 is one range now
    assert free.take(256) == 0
    free.release(d, 192)
    assert free.end == 256
    assert free.take(64) == 256


def test_overlapping_blocks_are_listed_up_to_the_limit():
    blocks = [Block("a", 64, 0, 2), Block("b", 64, 2, 3), Block("c", 64, 3, 4), Block("none", 0, 0, 9)]
    listed = {name: [o.name for o in others] for name, others in (list_overlaps(blocks, 100) or {}).items()}
    assert listed == {"a": ["b"], "b": ["a", "c"], "c": ["b"], "none": ["a", "b", "c"]}
    assert list_overlaps(blocks, 2) is None
