"""Depth pruning: residual branches that can be removed so that the shortcut remains: blocks of a ResNet, sublayers of a transformer.

A branch is the f(x) of an Add `y = x + f(x)`. Without it y is x, of the same type; this equals the network with a branch output of zero.
Blocks whose shortcut changes the shape have no removable branch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from whet.errors import PruneError
from whet.network import Layer, Network, Tensor, verify
from whet.registry import suggest_name


@dataclass(frozen=True, eq=False)
class Branch:
    """`name` is that of the Add; `placed` the index of the Add input from the branch; `layers` its layers in execution order."""

    name: str
    place: int
    layers: tuple[str, ...]

    def __repr__(self) -> str:
        return f"Branch({self.name!r}, {len(self.layers)} layers)"


def branches(net: Network) -> list[Branch]:
    """All removable branches in execution order. Branches may be nested."""
    users = net.users()
    outputs = set(net.outputs)
    place = {t: i for i, layer in enumerate(net.layers) for t in layer.outputs}
    found = []
    for layer in net.layers:
        if layer.op != "Add" or layer.inputs[0] is layer.inputs[1]:
            continue
        for i, branch in enumerate(layer.inputs):
            shortcut = layer.inputs[1 - i]
            assert branch is not None
            assert shortcut is not None
            if branch.maker is None or shortcut.is_constant or not shortcut.type == branch.type == layer.output.type:
                continue
            inside = _list_layers_between(net, shortcut, branch, place)
            if inside and _is_closed(inside, branch, layer, users, outputs):
                found.append(Branch(layer.name, i, tuple(x.name for x in inside)))
    return found


def _list_layers_between(net: Network, start: Tensor, end: Tensor, place: dict[Tensor, int]) -> list[Layer]:
    """Layers on paths from `start` to `end` in execution order; empty when `end` does not depend on `start`."""
    first, last = place.get(start, -1), place[end]
    reached: set[Tensor] = {start}
    forward = []
    for layer in net.layers[first + 1 : last + 1]:
        reads = (*layer.inputs, *(t for r in layer.regions.values() for t in r.captures()))
        if any(t in reached for t in reads if t is not None):
            reached.update(layer.outputs)
            forward.append(layer)
    needed: set[Tensor] = {end}
    inside = []
    for layer in reversed(forward):
        if any(t in needed for t in layer.outputs):
            needed.update(t for t in layer.inputs if t is not None)
            inside.append(layer)
    return inside[::-1] if start in needed else []


def _is_closed(inside: Sequence[Layer], end: Tensor, add: Layer, users, outputs: set[Tensor]) -> bool:
    """True if no layer outside reads a value of the branch (except shapes) and only the Add reads its output."""
    names = {x.name for x in inside}
    for layer in inside:
        for t in layer.outputs:
            if t in outputs:
                return False
            readers = {x.name for x, _ in users.get(t, [])}
            if not readers <= (names | {add.name} if t is end else names | _shape_readers(t, users)):
                return False
    return True


def _shape_readers(t: Tensor, users) -> set[str]:
    return {x.name for x, _ in users.get(t, []) if x.op in ("Shape", "Size")}


def select_innermost(branch_list: Sequence[Branch], most: int = 8) -> list[Branch]:
    """Of nested branches the smallest ones, so that no layer is inside more than `most`: the tables of a choice have an axis for each of them."""
    inside: dict[str, int] = {}
    kept = set()
    for b in sorted(branch_list, key=lambda b: len(b.layers)):
        if all(inside.get(name, 0) < most for name in b.layers):
            kept.add(b.name)
            inside.update((name, inside.get(name, 0) + 1) for name in b.layers)
    return [b for b in branch_list if b.name in kept]


def list_removable(net: Network, blocks: Sequence[Branch], scores: Mapping[str, np.ndarray]) -> list[Branch]:
    """The half, rounded up, of each stage's branches that lose least: sums of single losses understate what a stage without branches loses.

    A stage are branches of the same ops whose sums have the same shape.
    """
    layers = {x.name: x for x in net.layers}
    stages: dict[tuple, list[Branch]] = {}
    for b in blocks:
        stages.setdefault((tuple(layers[b.name].output.shape), tuple(sorted(layers[n].op for n in b.layers))), []).append(b)
    allowed = set()
    for stage in stages.values():
        ranked = sorted(stage, key=lambda b: float(scores[b.name].sum()))
        allowed |= {b.name for b in ranked[: -(-len(stage) // 2)]}
    return [b for b in blocks if b.name in allowed]


def find_branches(branch_list: Sequence[Branch], names: Iterable[str]) -> list[Branch]:
    """The branches of these names. Raises PruneError with the nearest name."""
    known = {b.name: b for b in branch_list}
    for name in names:
        if name not in known:
            raise PruneError(
                f"unknown residual branch {name!r}.{suggest_name(name, list(known))} The network has {len(known)} removable branches."
            )
    return [known[n] for n in dict.fromkeys(names)]


def remove_branches(net: Network, names: Iterable[str]) -> Network:
    """A copy of `net` without the named branches (Branch.name) and without layers that only they need.

    Raises PruneError for an unknown name, or when a shape inside a branch is used outside.
    """
    chosen = find_branches(branches(net), names)
    made = net.clone()
    layers = {x.name: x for x in made.layers}
    for b in chosen:
        add = layers[b.name]
        shortcut = add.needs(1 - b.place)
        made.replace(add.output, shortcut)
        made.layers.remove(add)
    for layer in [x for x in made.layers if x.op == "Relu"]:
        t = layer.inputs[0]
        if t is not None and t.maker is not None and t.maker.op == "Relu":  # of two consecutive Relus of y = relu(x + f(x)) one is redundant
            made.replace(layer.output, t)
            made.layers.remove(layer)
    made.prune_dead()
    return verify(made)


def silence_branches(net: Network, names: Iterable[str]) -> Network:
    """`net` at full depth with the output of the named branches multiplied by zero: equivalent to `remove_branches`."""
    made = net.clone()
    layers = {x.name: x for x in made.layers}
    for b in find_branches(branches(net), names):
        add = layers[b.name]
        end = add.needs(b.place)
        zero = made.constant(np.zeros((), end.dtype.numpy), f"{b.name}.zero")
        off = made.add("Mul", end, zero, at=made.layers.index(add), name=f"{b.name}.off")
        add.inputs = tuple(off if i == b.place else t for i, t in enumerate(add.inputs))
    return made
