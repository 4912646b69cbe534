"""Pads channels to the multiples that a GPU's tensor cores read: 8 of 16-bit values, 16 of 8-bit values.

A network that was pruned without regard to the machine has 11 or 45 channels, which only the slowest kernels support. Convolutions and products that
produce such channels get zero filters, their readers get zero weights; layers between them keep padding and channels separate.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from whet.errors import NetworkError
from whet.network import Layer, Tensor
from whet.ops import get_op, infer_layer
from whet.passes._coupled_axes import CoupledAxes, Node, get_axis_size
from whet.rewrite.constants import gather_padded
from whet.rewrite.graph import Graph
from whet.rewrite.rules import Fired, Phase, Skip, network_pass

MIN_WORK = 1 << 16  # multiplications of a layer: with fewer, the launch dominates whichever kernel computes it
_MAX_GROWTH = 2  # more padding costs more than a slow kernel


@network_pass(phase=Phase.FILL)
def pad_channels(g: Graph) -> list[Fired | Skip]:
    if g.channel_alignment <= 1:
        return []
    axes = CoupledAxes(g.net)
    sizes, notes = _choose_sizes(g, axes)
    if sizes:
        _pad(g, axes, sizes)
    return notes


def _choose_sizes(g: Graph, axes: CoupledAxes) -> tuple[dict[Node, int], list[Fired | Skip]]:
    """New sizes of the leaves that are padded, and notes for the log."""
    multiples = _compute_multiples(g, axes)
    sizes: dict[Node, int] = {}
    reasons: dict[Node, str] = {}
    candidates = [(axes.root(n), read) for d in axes.dense if d.work >= MIN_WORK for n, read in ((d.read, True), (d.made, False)) if n is not None]
    changed = True
    while changed:  # padding for one reader may move another reader's channels off their multiple
        changed = False
        for root, read in candidates:
            multiple = multiples.get(root, g.channel_alignment // 2)
            if len(axes.layout(root, sizes)) % multiple == 0 or (root in reasons and not read):
                continue
            padded = _pad_leaves(axes, root, multiple, sizes)
            reason = _why_not_padded(axes, root, multiple, {**sizes, **padded}, padded, read)
            if reason is None:
                sizes.update(padded)
                changed = True
                reasons.pop(root, None)
            else:
                reasons.setdefault(root, reason)
    grown = {root: n for root, _ in candidates if (n := len(axes.layout(root, sizes))) != get_axis_size(root)}
    return sizes, _log_entries(g, axes, {**sizes, **grown}, reasons)


def _pad_leaves(axes: CoupledAxes, root: Node, multiple: int, sizes: Mapping[Node, int]) -> dict[Node, int]:
    """New sizes of an axis's leaves, multiples of `multiple`; the last gap between its parts is extended so that the whole is a multiple too."""
    leaves = {leaf: sizes.get(leaf, get_axis_size(leaf)) for leaf in axes.leaves(root)}
    padded = {leaf: -(-n // multiple) * multiple for leaf, n in leaves.items() if n % multiple and leaf not in axes.gaps}
    missing = -len(axes.layout(root, {**sizes, **padded})) % multiple
    last = next((part for part, _ in reversed(axes.parts_of.get(root, ())) if part in axes.gaps), None)
    return padded if last is None or not missing else {**padded, last: leaves[last] + missing}


def _why_not_padded(axes: CoupledAxes, root: Node, multiple: int, sizes: Mapping[Node, int], padded: Mapping[Node, int], read: bool) -> str | None:
    """Why an axis must not be padded so, or None."""
    fixed = next(
        (axes.locked[leaf] for leaf in axes.leaves(root) if leaf in axes.locked and (leaf in padded or get_axis_size(leaf) % multiple)), None
    )
    grown = len(axes.layout(root, sizes))
    if fixed is not None or grown % multiple:
        return fixed or f"{grown} would not be a multiple of {multiple} either"
    if grown > _MAX_GROWTH * get_axis_size(root) and not (read and root in padded):
        return f"{grown} would be more than {_MAX_GROWTH} times as many"
    return None


def _compute_multiples(g: Graph, axes: CoupledAxes) -> dict[Node, int]:
    """The required multiple of each axis of 8-bit values; other axes need half of it."""
    stored = (n for layer in g.layers for n in axes.nodes(layer) if n[0].weight is None and n[0].dtype.bits == 8)
    return {axes.root(n): g.channel_alignment for n in stored}


def _log_entries(g: Graph, axes: CoupledAxes, sizes: Mapping[Node, int], reasons: Mapping[Node, str]) -> list[Fired | Skip]:
    """Log entries: each axis with a new size, at the first layer that produces it, with the number of layers that share its channels."""
    makers: dict[Node, list[str]] = {}
    for layer in g.layers:
        for n in dict.fromkeys(axes.root((t, i)) for t in layer.outputs for i in range(t.type.rank)):
            if n in sizes or n in reasons:
                makers.setdefault(n, []).append(layer.name)
    notes: list[Fired | Skip] = []
    for n, (first, *others) in makers.items():
        if n in sizes:
            shared = f", in {len(others)} more layers too" if others else ""
            notes.append(Fired(f"{get_axis_size(n)} channels become {sizes[n]}{shared}", first))
        else:
            notes.append(Skip(f"its {get_axis_size(n)} channels are not padded: {reasons[n]}", first))
    return notes


def _pad(g: Graph, axes: CoupledAxes, sizes: Mapping[Node, int]) -> None:
    """Pads constants and updates attributes and types."""
    layouts: dict[Node, np.ndarray] = {}
    padded: dict[Tensor, Tensor] = {}
    scales = {layer.inputs[1] for layer in g.layers if layer.op in ("QuantizeLinear", "DequantizeLinear")}

    def get_layout(n: Node) -> np.ndarray:
        root = axes.root(n)
        if root not in layouts:
            layouts[root] = axes.layout(root, sizes)
        return layouts[root]

    for layer in g.layers:
        changed = {n: at for n in axes.nodes(layer) if len(at := get_layout(n)) != get_axis_size(n)}
        if not changed:
            continue
        recut = get_op(layer.op).recut
        change = {} if recut is None else recut(layer, {n: np.maximum(at, ~at) for n, at in changed.items()})
        inputs: list[Tensor | None] = list(layer.inputs)
        for i, t in enumerate(inputs):
            layouts_of_t = {axis: at for (x, axis), at in changed.items() if x is t}
            if t is None or t.weight is None or not layouts_of_t:
                continue
            if t not in padded:
                weight = t.weight
                for axis, at in layouts_of_t.items():
                    weight = gather_padded(weight, axis, at, int(t in scales))
                padded[t] = g.constant(weight, f"{t.name}_filled")
            inputs[i] = padded[t]
        for key, value in change.items():
            if isinstance(key, str):
                layer.attrs[key] = value
            else:
                inputs += [None] * (key + 1 - len(inputs))
                inputs[key] = None if value is None else g.constant(np.asarray(value), f"{layer.name}.{key}")
        layer.inputs = tuple(inputs)
    for layer in g.layers:
        _infer(layer, get_layout, axes)
    g.reindex()
    for name, t in list(g.net.constants.items()):
        if not g.readers(t) and not g.is_output(t):
            del g.net.constants[name]


def _infer(layer: Layer, layout: Callable[[Node], np.ndarray], axes: CoupledAxes) -> None:
    """Updates the types of a layer's outputs. Raises NetworkError when they are not the padded sizes."""
    want = {n: len(layout(n)) for n in axes.nodes(layer) if n[0] in layer.outputs}
    types, values = infer_layer(layer)
    for t, type_, value in zip(layer.outputs, types, values, strict=True):
        for (x, axis), n in want.items():
            if x is t and type_.shape[axis] != n:
                raise NetworkError(f"{layer.op} '{layer.name}' computes {type_} from its padded inputs, not {n} along axis {axis}")
        t.type, t.shape_value = type_, value
