"""Topological order of the nodes of a graph, including values captured by subgraphs, and the nodes that some outputs need."""

from __future__ import annotations

import heapq
from collections.abc import Container, Iterable, Sequence

from onnx import AttributeProto, GraphProto, NodeProto

from whet.errors import FrontendError
from whet.frontends._onnx_advice import DAMAGED
from whet.frontends._onnx_load import list_initializers


def sort_nodes(nodes: Sequence[NodeProto], known: Container[str], prefix: str = "") -> list[tuple[str, NodeProto]]:
    """Returns (name, node) pairs in topological order, stable with respect to the given order; `known` are values defined outside.

    An unnamed node is named after `prefix`, its op and its index. Raises FrontendError for a value defined twice, an undefined value, or a
    cycle.
    """
    named = [(n.name or f"{prefix}{n.op_type.lower()}_{i}", n) for i, n in enumerate(nodes)]
    maker: dict[str, int] = {}
    for i, (name, node) in enumerate(named):
        for out in node.output:
            if not out:
                continue
            if out in maker:
                raise FrontendError(f"the value {out!r} is defined twice: by node '{named[maker[out]][0]}' and by node '{name}'. {DAMAGED}")
            maker[out] = i
    reads = [sorted({maker[v] for v in _reads(n) if v in maker}) for _, n in named]
    for name, node in named:
        for v in node.input:
            if v and v not in maker and v not in known:
                raise FrontendError(f"node '{name}' ({node.op_type}) reads {v!r}, which is undefined (no input, weight or node). {DAMAGED}")
    waiting = [len(needs) for needs in reads]
    readers: list[list[int]] = [[] for _ in named]
    for i, needs in enumerate(reads):
        for j in needs:
            readers[j].append(i)
    ready = [i for i, n in enumerate(waiting) if n == 0]
    order: list[int] = []
    while ready:
        i = heapq.heappop(ready)
        order.append(i)
        for j in readers[i]:
            waiting[j] -= 1
            if waiting[j] == 0:
                heapq.heappush(ready, j)
    if len(order) != len(named):
        stuck = [named[i][0] for i, n in enumerate(waiting) if n > 0]
        raise FrontendError(f"nodes form a cycle: {', '.join(stuck[:8])}{', ...' if len(stuck) > 8 else ''}. {DAMAGED}")
    return [named[i] for i in order]


def cut_graph(graph: GraphProto, outputs: Sequence[int]) -> GraphProto:
    """The graph with only these outputs (indices) and the nodes that they need; its inputs and weights are kept."""
    kept = [graph.output[i] for i in outputs]
    maker = {out: node for node in graph.node for out in node.output if out}
    needed = {info.name for info in kept}
    waiting = list(needed)
    while waiting:
        name = waiting.pop()
        more = set(_reads(maker[name])) - needed if name in maker else set()
        needed |= more
        waiting += more
    nodes = [n for n in graph.node if any(out in needed for out in n.output)]
    weights = {"initializer": graph.initializer, "sparse_initializer": graph.sparse_initializer}
    return GraphProto(name=graph.name, node=nodes, input=graph.input, output=kept, **weights)


def _reads(node: NodeProto) -> Iterable[str]:
    """Values that a node reads, including captures of its subgraphs."""
    yield from node.input
    for a in node.attribute:
        for sub in [a.g] if a.type == AttributeProto.GRAPH else a.graphs:
            yield from _find_captured_names(sub)


def _find_captured_names(sub: GraphProto) -> set[str]:
    inside = {v.name for v in sub.input} | {name for name, _ in list_initializers(sub)} | {o for n in sub.node for o in n.output}
    read = {v for n in sub.node for v in _reads(n)} | {o.name for o in sub.output}
    return read - inside - {""}
