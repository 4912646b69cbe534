"""Selecting formats and tactics for the whole graph as a PBQP: layers are nodes, reformats between layers are edge costs."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np

from whet.builder.select.pbqp import Problem
from whet.errors import NoTacticError
from whet.measure.option import Option
from whet.network import Layer, Network, Tensor
from whet.tactics import Operand

ReformatCost = Callable[[Tensor, Operand, Operand], float]
"""(tensor, stored format, required format) -> milliseconds; infinity if no tactic converts it."""


@dataclass(frozen=True)
class Assignment:
    """The option `picked` per layer, the sum of times in ms and the method that found it.

    `core` are the layers that did not reduce (see pbqp.py), `tried` the cost by each method for the core, which counts a shared reformat once
    per reader.
    """

    picked: dict[str, Option]
    cost: float
    method: str
    core: tuple[str, ...] = ()
    tried: dict[str, float] = field(default_factory=dict)

    def differs_from(self, other: Assignment) -> bool:
        """True if another assignment has other layers or picks another option for one of them."""
        return self.picked.keys() != other.picked.keys() or any(self.picked[n] is not other.picked[n] for n in self.picked)


@dataclass(frozen=True)
class Link:
    """Layer `maker` writes a tensor (output `index`) that layer `reader` reads as input `slot`; None: the network's own edge."""

    tensor: Tensor
    maker: str | None
    index: int
    reader: str | None
    slot: int


def list_links(net: Network) -> list[Link]:
    """All edges between two layers, or between a layer and an input or output of the network; none for constants."""
    edges: list[Link] = []
    for layer in net.layers:
        for i, t in enumerate(layer.inputs):
            if t is not None and not t.is_constant:
                edges.append(Link(t, t.maker.name if t.maker else None, t.index, layer.name, i))
    for t in net.outputs:
        if t.maker is not None:
            edges.append(Link(t, t.maker.name, t.index, None, 0))
    return edges


def get_stored_operand(link: Link, picked: Mapping[str, Option]) -> Operand:
    """The format in which the tensor of a link is stored."""
    return Operand("linear", link.tensor.dtype) if link.maker is None else picked[link.maker].signature.outputs[link.index]


def get_required_operand(link: Link, picked: Mapping[str, Option]) -> Operand | None:
    """The format in which the reader of a link requires it; None if it does not read the data."""
    return Operand("linear", link.tensor.dtype) if link.reader is None else picked[link.reader].signature.inputs[link.slot]


class TensorReaders:
    """Which layers of a network read a tensor: for many queries on a network that does not change between them."""

    def __init__(self, net: Network):
        self.net, self._layers, self._count = net, net.layers, len(net.layers)
        self.inputs, self.outputs = set(net.inputs), set(net.outputs)
        self.position = {layer: i for i, layer in enumerate(net.layers)}
        self._readers: dict[Tensor, list[int]] = {}
        for i, layer in enumerate(net.layers):
            for t in (*layer.inputs, *(t for r in layer.regions.values() for t in r.captures())):
                if t is not None:
                    self._readers.setdefault(t, []).append(i)

    def describes(self, net: Network) -> bool:
        """False if this is another network, or layers were added or removed (unfusing and sorting replace the list of layers)."""
        return net is self.net and net.layers is self._layers and len(net.layers) == self._count

    def find_later_reader(self, t: Tensor, layer: Layer) -> Layer | None:
        """The first layer after `layer` that reads `t`, or None."""
        readers = self._readers.get(t, [])
        i = bisect_right(readers, self.position[layer])
        return self._layers[readers[i]] if i < len(readers) else None


def explain_inplace_refusal(net: Network | TensorReaders, layer: Layer, option: Option) -> str | None:
    """Why an in-place signature cannot be used for this layer, or None.

    The input's bytes are overwritten, so nothing else may read them: it must not be an input, an output or a constant of the network, another
    operand of the layer, or an input of a later layer. Outputs of the network have bytes of their own.
    """
    readers = net if isinstance(net, TensorReaders) else TensorReaders(net)
    for i, o in option.signature.inplace:
        t = layer.inputs[i]
        if t is None or t.is_constant:
            return f"works in place on input {i}, which is constant"
        if t in readers.inputs:
            return f"works in place on %{t.name}, which is an input of the network"
        if t in readers.outputs or layer.outputs[o] in readers.outputs:
            return f"works in place on %{t.name} and %{layer.outputs[o].name}, of which one is an output of the network"
        if sum(x is t for x in layer.inputs) > 1:
            return f"works in place on %{t.name}, which it reads a second time"
        if (later := readers.find_later_reader(t, layer)) is not None:
            return f"works in place on %{t.name}, which '{later.name}' still reads"
    return None


def choose_formats(net: Network, options: Mapping[str, list[Option]], reformat: ReformatCost) -> Assignment:
    """The assignment of least total time. `options` are those of each layer, one per signature.

    Raises NoTacticError if no combination of formats is possible.
    """
    problem = Problem()
    edges = list_links(net)
    for layer in net.layers:
        problem.add_node(layer.name, [o.cost for o in options[layer.name]])
    for w in edges:
        linear = Operand("linear", w.tensor.dtype)
        if w.maker is None and w.reader is None:
            continue
        if w.maker is None:
            costs = [_compute_price(w, linear, o.signature.inputs[w.slot], reformat) for o in options[w.reader or ""]]
            problem.nodes[w.reader] = problem.nodes[w.reader] + costs
        elif w.reader is None:
            prices = [_compute_price(w, o.signature.outputs[w.index], linear, reformat) for o in options[w.maker]]
            problem.nodes[w.maker] = problem.nodes[w.maker] + prices
        else:
            rows = [o.signature.outputs[w.index] for o in options[w.maker]]
            columns = [o.signature.inputs[w.slot] for o in options[w.reader]]
            problem.add_edge(w.maker, w.reader, [[_compute_price(w, a, b, reformat) for b in columns] for a in rows])
    solution = problem.solve()
    if not np.isfinite(solution.cost):
        raise NoTacticError(_explain_no_assignment(net, options, edges, reformat))
    picked = {str(name): options[str(name)][i] for name, i in solution.picked.items()}
    picked, cost, moved = _share(net, options, picked, edges, reformat)
    method = "exact" if solution.exact else solution.tried[0][0]
    if moved:
        method += f", then {moved} layers moved because readers share reformats"
    return Assignment(picked, cost, method, tuple(map(str, solution.core)), dict(solution.tried))


def _compute_price(w: Link, a: Operand, b: Operand | None, reformat: ReformatCost) -> float:
    return 0.0 if b is None or a == b else reformat(w.tensor, a, b)


def compute_total_time(net: Network, picked: Mapping[str, Option], edges: list[Link], reformat: ReformatCost) -> float:
    """Milliseconds of all layers and of the reformats between them; readers of the same format share a reformat."""
    moves = {(id(w.tensor), get_stored_operand(w, picked), get_required_operand(w, picked)): w for w in edges}
    return sum(picked[layer.name].cost for layer in net.layers) + sum(_compute_price(w, a, b, reformat) for (_, a, b), w in moves.items())


def _share(net, options, picked: dict[str, Option], edges: list[Link], reformat: ReformatCost) -> tuple[dict[str, Option], float, int]:
    """Improves an assignment under shared reformats (edges count one per reader): layers change options one by one while the total falls."""
    picked = dict(picked)
    reads: dict[str, list[Link]] = {layer.name: [] for layer in net.layers}
    writes: dict[str, list[Link]] = {layer.name: [] for layer in net.layers}  # one link per tensor
    readers: dict[Tensor, Counter[Operand | None]] = {}  # of each tensor, by the format that they require
    for w in edges:
        if w.reader is not None:
            reads[w.reader].append(w)
        if w.maker is not None and w.tensor not in readers:
            writes[w.maker].append(w)
        readers.setdefault(w.tensor, Counter())[get_required_operand(w, picked)] += 1

    def pick(name: str, option: Option) -> None:
        for w in reads[name]:
            formats = readers[w.tensor]
            formats[get_required_operand(w, picked)] -= 1
            formats[option.signature.inputs[w.slot]] += 1
        picked[name] = option

    def compute_local_cost(name: str) -> float:
        touched = {w.tensor: w for w in (*reads[name], *writes[name])}.values()
        moves = sum(_compute_price(w, get_stored_operand(w, picked), b, reformat) for w in touched for b, count in readers[w.tensor].items() if count)
        return picked[name].cost + moves

    moved: set[str] = set()
    for _ in range(10):
        changed = False
        for layer in net.layers:
            name, before = layer.name, picked[layer.name]
            others = [o for o in options[name] if o is not before]
            if not others:
                continue
            best, best_cost = before, compute_local_cost(name)
            for o in others:
                pick(name, o)
                cost = compute_local_cost(name)
                if cost < best_cost - 1e-9:
                    best, best_cost = o, cost
            pick(name, best)
            if best is not before:
                moved.add(name)
                changed = True
        if not changed:
            break
    return picked, compute_total_time(net, picked, edges, reformat), len(moved)


def _explain_no_assignment(net: Network, options, edges: list[Link], reformat: ReformatCost) -> str:
    for w in edges:
        makers = {o.signature.outputs[w.index] for o in options[w.maker]} if w.maker else {Operand("linear", w.tensor.dtype)}
        readers = {o.signature.inputs[w.slot] for o in options[w.reader]} if w.reader else {Operand("linear", w.tensor.dtype)}
        if not any(np.isfinite(_compute_price(w, a, b, reformat)) for a in makers for b in readers):
            return (
                f"%{w.tensor.name} is made by '{w.maker or 'the caller'}' as {', '.join(map(str, makers))} and read by "
                f"'{w.reader or 'the caller'}' as {', '.join(map(str, readers))}, and no tactic reformats one into the other. "
                "Allow fewer precisions, or write a tactic for the op Reformat."
            )
    return f"the formats of '{net.name}' cannot be joined"
