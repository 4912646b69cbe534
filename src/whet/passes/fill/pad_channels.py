"""Channels are filled up to the multiples that a GPU's tensor cores read: 8 of 16-bit numbers, 16 of 8-bit ones.

A network that was pruned without regard to the machine has 11 or 45 channels, and no kernel but the slowest takes them. Filters of zeros
are added where a convolution or product makes such channels, zero weights where another one reads them; what lies between keeps them apart.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from whet.errors import NetworkError
from whet.network import Layer, Tensor
from whet.ops import get_op, infer_layer
from whet.passes._ties import Node, Ties, size
from whet.rewrite.constants import gather_padded
from whet.rewrite.graph import Graph
from whet.rewrite.rules import Fired, Phase, Skip, network_pass

_LEAST = 1 << 16  # products of a layer; one with fewer is a launch and little else, whatever kernel computes it
_MOST = 2  # times as many channels at most, where another kernel than the slowest is left


@network_pass(phase=Phase.FILL)
def pad_channels(g: Graph) -> list[Fired | Skip]:
    if g.channel_alignment <= 1:
        return []
    ties = Ties(g.net)
    sizes, notes = _sizes(g, ties)
    if sizes:
        _fill(g, ties, sizes)
    return notes


def _sizes(g: Graph, ties: Ties) -> tuple[dict[Node, int], list[Fired | Skip]]:
    """New sizes of the leaves that are filled, and what is to be said."""
    steps = _steps(g, ties)
    sizes: dict[Node, int] = {}
    reasons: dict[Node, str] = {}
    asked = [(ties.root(n), read) for d in ties.dense if d.work >= _LEAST for n, read in ((d.read, True), (d.made, False)) if n is not None]
    waiting = True
    while waiting:  # what is filled for one reader may put another one's channels out of step
        waiting = False
        for root, read in asked:
            step = steps.get(root, g.channel_alignment // 2)
            if len(ties.layout(root, sizes)) % step == 0 or (root in reasons and not read):
                continue
            fuller = _fuller(ties, root, step, sizes)
            reason = _against(ties, root, step, {**sizes, **fuller}, fuller, read)
            if reason is None:
                sizes.update(fuller)
                waiting = True
                reasons.pop(root, None)
            else:
                reasons.setdefault(root, reason)
    grown = {root: n for root, _ in asked if (n := len(ties.layout(root, sizes))) != size(root)}
    return sizes, _notes(g, ties, {**sizes, **grown}, reasons)


def _fuller(ties: Ties, root: Node, step: int, sizes: Mapping[Node, int]) -> dict[Node, int]:
    """The leaves of an axis in whole steps; what lies between its parts makes up for what all of it lacks, at one place."""
    leaves = {leaf: sizes.get(leaf, size(leaf)) for leaf in ties.leaves(root)}
    fuller = {leaf: -(-n // step) * step for leaf, n in leaves.items() if n % step and leaf not in ties.between}
    lacking = -len(ties.layout(root, {**sizes, **fuller})) % step
    last = next((part for part, _ in reversed(ties.made_of.get(root, ())) if part in ties.between), None)
    return fuller if last is None or not lacking else {**fuller, last: leaves[last] + lacking}


def _against(ties: Ties, root: Node, step: int, sizes: Mapping[Node, int], fuller: Mapping[Node, int], read: bool) -> str | None:
    """Why an axis must not be filled so, or None."""
    fixed = next((ties.locked[leaf] for leaf in ties.leaves(root) if leaf in ties.locked and (leaf in fuller or size(leaf) % step)), None)
    grown = len(ties.layout(root, sizes))
    if fixed is not None or grown % step:
        return fixed or f"{grown} would be odd too"
    if grown > _MOST * size(root) and not (read and root in fuller):
        return f"{grown} would be more than {_MOST} times as many"
    return None


def _steps(g: Graph, ties: Ties) -> dict[Node, int]:
    """The multiple that each axis of 8-bit numbers comes in; others have half of it."""
    stored = (n for layer in g.layers for n in ties.nodes(layer) if n[0].weight is None and n[0].dtype.bits == 8)
    return {ties.root(n): g.channel_alignment for n in stored}


def _notes(g: Graph, ties: Ties, sizes: Mapping[Node, int], reasons: Mapping[Node, str]) -> list[Fired | Skip]:
    """What is reported: axes that became of other sizes, at the first layer that makes each, with how many others share its channels."""
    makers: dict[Node, list[str]] = {}
    for layer in g.layers:
        for n in dict.fromkeys(ties.root((t, i)) for t in layer.outputs for i in range(t.type.rank)):
            if n in sizes or n in reasons:
                makers.setdefault(n, []).append(layer.name)
    notes: list[Fired | Skip] = []
    for n, (first, *others) in makers.items():
        if n in sizes:
            shared = f", in {len(others)} more layers too" if others else ""
            notes.append(Fired(f"{size(n)} channels become {sizes[n]}{shared}", first))
        else:
            notes.append(Skip(f"its {size(n)} channels stay odd: {reasons[n]}", first))
    return notes


def _fill(g: Graph, ties: Ties, sizes: Mapping[Node, int]) -> None:
    """Fills constants, attributes and types."""
    layouts: dict[Node, np.ndarray] = {}
    made: dict[Tensor, Tensor] = {}
    scales = {layer.inputs[1] for layer in g.layers if layer.op in ("QuantizeLinear", "DequantizeLinear")}

    def layout(n: Node) -> np.ndarray:
        root = ties.root(n)
        if root not in layouts:
            layouts[root] = ties.layout(root, sizes)
        return layouts[root]

    for layer in g.layers:
        here = {n: at for n in ties.nodes(layer) if len(at := layout(n)) != size(n)}
        if not here:
            continue
        recut = get_op(layer.op).recut
        change = {} if recut is None else recut(layer, {n: np.maximum(at, ~at) for n, at in here.items()})
        inputs: list[Tensor | None] = list(layer.inputs)
        for i, t in enumerate(inputs):
            axes = {axis: at for (x, axis), at in here.items() if x is t}
            if t is None or t.weight is None or not axes:
                continue
            if t not in made:
                weight = t.weight
                for axis, at in axes.items():
                    weight = gather_padded(weight, axis, at, int(t in scales))
                made[t] = g.constant(weight, f"{t.name}_filled")
            inputs[i] = made[t]
        for place, value in change.items():
            if isinstance(place, str):
                layer.attrs[place] = value
            else:
                inputs += [None] * (place + 1 - len(inputs))
                inputs[place] = None if value is None else g.constant(np.asarray(value), f"{layer.name}.{place}")
        layer.inputs = tuple(inputs)
    for layer in g.layers:
        _infer(layer, layout, ties)
    g.reindex()
    for name, t in list(g.net.constants.items()):
        if not g.readers(t) and not g.is_output(t):
            del g.net.constants[name]


def _infer(layer: Layer, layout, ties: Ties) -> None:
    """New types of a layer's outputs. Raises NetworkError where they are not what the axes were filled to."""
    want = {n: len(layout(n)) for n in ties.nodes(layer) if n[0] in layer.outputs}
    types, values = infer_layer(layer)
    for t, type_, value in zip(layer.outputs, types, values, strict=True):
        for (x, axis), n in want.items():
            if x is t and type_.shape[axis] != n:
                raise NetworkError(f"{layer.op} '{layer.name}' makes {type_} of its filled inputs, not {n} along axis {axis}")
        t.type, t.shape_value = type_, value
