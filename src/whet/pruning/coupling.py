"""Coupled channels: the axes that ops couple, joined over the whole network.

An element is one index of one axis of one tensor. Elements coupled by a layer (op.couples) belong to one unit, which is cut or kept as a
whole. A unit may be cut only if every producer and reader of its tensors declares how; network inputs and outputs, dynamic dims and
captured tensors are never cut. Units on the same axes form a group, for example the output channels of conv1 with the parameters of bn1
and the input channels of conv2 (the groups of the pruning literature). No op is named here.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from whet.errors import PruneError
from whet.network import Layer, Network, Tensor
from whet.ops import Couple, get_op
from whet.pruning._components import find_components
from whet.pruning.zeros import find_locked_sums
from whet.registry import suggest_name

Axis = tuple[Tensor, int]
Couples = Callable[[Layer], list[Couple]]
HIDDEN = "@hidden"  # ends the names of groups that are cut through means and variances


@dataclass(frozen=True, eq=False)
class Group:
    """Channels that are cut together. `members[tensor, axis]` is int64 [size, block]: the indices of each unit along that axis.

    `name` is that of the first weight that produces these channels; recipes refer to it. `layers` are the affected layers in execution
    order.
    """

    name: str
    size: int
    members: Mapping[Axis, np.ndarray]
    layers: tuple[str, ...]

    def weights(self) -> Iterator[tuple[Tensor, int, np.ndarray]]:
        """(constant, axis, indices [size, block]) of the float constants in the group."""
        for (t, axis), at in self.members.items():
            if t.is_constant and t.dtype.is_float:
                yield t, axis, at

    @property
    def block(self) -> int:
        """Contiguous channels per unit in the producing weight: 1 for a channel, 64 for a head of that width."""
        own = re.sub(r"[#@]\d+$", "", re.sub(r"@\d+$", "", self.name.removesuffix(HIDDEN)))
        for t, _, at in self.weights():
            if t.name in (own, self.name):
                gaps = np.flatnonzero(np.diff(at[0]) != 1)
                return int(gaps[0]) + 1 if len(gaps) else at.shape[1]
        return 1

    def __repr__(self) -> str:
        return f"Group({self.name!r}, {self.size} channels over {len(self.layers)} layers)"


def groups(net: Network, *, hidden: bool = False) -> list[Group]:
    """All groups with at least two channels and a weight of two or more axes, in order of first use.

    A product axis (heads times head width, groups of a convolution times their channels) can be cut by each factor. So the analysis runs
    three times: by the ops' `couples`, and with the second and the innermost factor of such axes as the unit. Groups found only by a later
    run have the factor index in their name: `in_proj_weight@1` are the heads of a fused projection, `in_proj_weight@0` the head widths.
    Where a layer repeats values along a new axis that the next one merges (the keys of grouped-query attention), one more run cuts repetitions:
    `q_proj@repeat` are the query heads of each key's group. Groups of different runs may be cut together: the result is again a product.

    With `hidden` another run also cuts axes over which a norm takes its mean and variance (`Op.statistics`): the residual width of transformers
    and ConvNeXt. The statistics are then of the kept channels, so the network differs from the one whose channels are zero and has to be
    recovered or fine-tuned. Names of these groups end with `@hidden`.
    """
    runs: list[tuple[str, Couples]] = [("", partial(_list_couples, level=None))]
    runs += [(f"@{lv}", partial(_list_couples, level=lv)) for lv in (1, 0) if _read_otherwise(net, lv)]
    repeated = _find_repeated_couples(net)
    runs += [("@repeat", lambda layer: repeated.get(layer) or _list_couples(layer, None))] if repeated else []
    runs += [(HIDDEN, _with_statistics)] if hidden else []
    found: list[tuple[tuple[int, int], Group]] = []
    seen: set[tuple] = set()
    for suffix, couples in runs:
        for place, g in _iterate_groups(net, couples):
            mark = (g.size, tuple(sorted((t.name, axis, at.tobytes()) for (t, axis), at in g.members.items())))
            if mark not in seen:
                seen.add(mark)
                found.append((place, replace(g, name=g.name + suffix)))
    return [g for _, g in sorted(found, key=lambda f: f[0])]


def _read_otherwise(net: Network, level: int) -> bool:
    """True if some layer has other couples at this level."""
    ops = ((layer, get_op(layer.op)) for layer in net.layers)
    return any(o.couples is not None and o.inner is not None and o.inner(layer, level) != o.couples(layer) for layer, o in ops)


def list_groups_for(net: Network, names: Iterable[str]) -> list[Group]:
    """The groups of `net`, with those through statistics if one of `names` is of that kind."""
    return groups(net, hidden=any(name.endswith(HIDDEN) for name in names))


def _iterate_groups(net: Network, couples_of: Couples) -> Iterator[tuple[tuple[int, int], Group]]:
    """Groups of one run with their positions in the order."""
    axes = _list_axes(net)
    base: dict[Axis, int] = {}
    n = 0
    for t, axis in axes:
        base[t, axis] = n
        n += t.shape[axis]
    locked = np.zeros(n, bool)
    edges: list[tuple[np.ndarray, np.ndarray]] = []
    read = [(layer, couples_of(layer)) for layer in net.layers]
    for layer, couples in read:
        _tie(layer, couples, base, locked, edges)
    locked |= find_locked_sums(net, read, base, n)
    for t in (*net.inputs, *net.outputs):
        _lock(t, base, locked)
    first = np.concatenate([e[0] for e in edges]) if edges else np.zeros(0, np.int64)
    second = np.concatenate([e[1] for e in edges]) if edges else np.zeros(0, np.int64)
    root = find_components(n, first, second)
    fixed = np.zeros(n, bool)
    fixed[root[locked]] = True
    yield from _collect(net, axes, base, root, fixed[root])


def find_group(channel_groups: list[Group], name: str) -> Group:
    """The group called `name`. Raises PruneError with the nearest name."""
    for g in channel_groups:
        if g.name == name:
            return g
    raise PruneError(
        f"unknown group {name!r}.{suggest_name(name, [g.name for g in channel_groups])} The network has {len(channel_groups)} groups that can be cut."
    )


def _list_axes(net: Network) -> list[Axis]:
    """Axes of static size >= 2 of all tensors of the layers."""
    seen: dict[Tensor, None] = {}
    for layer in net.layers:
        seen.update(dict.fromkeys(t for t in (*layer.inputs, *layer.outputs) if t is not None))
    return [(t, i) for t in seen for i, d in enumerate(t.shape) if isinstance(d, int) and d > 1]


def _list_couples(layer: Layer, level: int | None) -> list[Couple]:
    """The couples that the layer's op declares at one level, and those of its means."""
    o = get_op(layer.op)
    if o.couples is None or layer.regions:
        return []
    couples = o.couples(layer) if level is None or o.inner is None else o.inner(layer, level)
    return couples if o.means is None else [*couples, *o.means(layer)]


def _find_repeated_couples(net: Network) -> dict[Layer, list[Couple]]:
    """Couples of the innermost factors, for each layer that merges an axis along which the layer before it repeats values."""
    found: dict[Layer, list[Couple]] = {}
    for layer in net.layers:
        o = get_op(layer.op)
        maker = layer.inputs[0].maker if layer.inputs and layer.inputs[0] is not None else None
        if o.inner is None or maker is None:
            continue
        free = {c.a_axis for c in _list_couples(maker, None) if c.a is c.b is layer.inputs[0] and c.a.shape[c.a_axis] != 1}
        inner = o.inner(layer, 0)
        if any(t is layer.inputs[0] and axis in free for c in inner for t, axis in ((c.a, c.a_axis), (c.b, c.b_axis))):
            found[layer] = inner
    return found


def _with_statistics(layer: Layer) -> list[Couple]:
    """The layer's couples, with those of axes over which it takes statistics."""
    o, couples = get_op(layer.op), _list_couples(layer, None)
    return couples + o.statistics(layer) if o.statistics is not None and not layer.regions else couples


def _tie(
    layer: Layer, couples: list[Couple], base: Mapping[Axis, int], locked: np.ndarray, edges: list[tuple[np.ndarray, np.ndarray]]
) -> None:
    """Adds the edges of one layer's couples; locks axes without couples."""
    named: set[Axis] = set()
    for c in couples:
        a, b = (c.a, c.a_axis), (c.b, c.b_axis)
        named |= {a, b}
        if a in base and b in base:
            edges.append(_compute_edges(c, base[a], base[b]))
        else:  # coupled to an axis of size one or unknown size: it cannot be cut
            for one in (a, b):
                if one in base:
                    locked[base[one] : base[one] + one[0].shape[one[1]]] = True
    for t in (*layer.inputs, *layer.outputs):
        if t is not None:
            for i in range(t.type.rank):
                if (t, i) in base and (t, i) not in named:
                    locked[base[t, i] : base[t, i] + t.shape[i]] = True
    for region in layer.regions.values():
        for t in region.captures():
            _lock(t, base, locked)


def _compute_edges(c: Couple, at_a: int, at_b: int) -> tuple[np.ndarray, np.ndarray]:
    """Edges that connect each unit: its first element of `a` with all others."""
    a, b = c.indexes()
    others = np.concatenate([at_a + a[:, 1:], at_b + b], axis=1)
    return np.repeat(at_a + a[:, 0], others.shape[1]), others.reshape(-1)


def _lock(t: Tensor, base: Mapping[Axis, int], locked: np.ndarray) -> None:
    for i in range(t.type.rank):
        if (t, i) in base:
            locked[base[t, i] : base[t, i] + t.shape[i]] = True


def _collect(
    net: Network, axes: list[Axis], base: Mapping[Axis, int], root: np.ndarray, fixed: np.ndarray
) -> Iterator[tuple[tuple[int, int], Group]]:
    """Groups of the cuttable units."""
    sizes = [t.shape[i] for t, i in axes]
    free = np.flatnonzero(~fixed)  # elements that may be cut, by axis
    numbers = np.repeat(np.arange(len(axes)), sizes)[free]  # of their axes
    along = free - np.repeat(np.array([base[a] for a in axes], np.int64), sizes)[free]  # indices along their axes
    roots, first, unit_of = np.unique(root[free], return_index=True, return_inverse=True)
    rank = np.argsort(np.argsort(first))[unit_of]  # units in the order of their first elements
    by_unit = np.argsort(rank, kind="stable")
    numbers, along, roots = numbers[by_unit], along[by_unit], roots[np.argsort(first)]
    counts = np.bincount(rank, minlength=len(roots))
    starts = np.cumsum(counts) - counts
    alike: dict[bytes, list[int]] = {}  # axis numbers of a unit's elements -> units
    for k, (start, count) in enumerate(zip(starts.tolist(), counts.tolist(), strict=True)):
        alike.setdefault(numbers[start : start + count].tobytes(), []).append(k)
    order = {layer.name: k for k, layer in enumerate(net.layers)}
    touching: dict[Tensor, list[str]] = {}
    for layer in net.layers:
        for t in {t for t in (*layer.inputs, *layer.outputs) if t is not None}:
            touching.setdefault(t, []).append(layer.name)
    found = []
    for units in alike.values():
        if len(units) < 2:
            continue
        own, table = numbers[starts[units[0]] :][: counts[units[0]]], along[starts[units][:, None] + np.arange(counts[units[0]])]
        members = {axes[n]: np.ascontiguousarray(table[:, own == n]) for n in dict.fromkeys(own.tolist())}
        matrices = [(t, i) for t, i in members if t.is_constant and t.type.rank > 1]
        if not matrices:
            continue
        layers = sorted({name for t, _ in members for name in touching[t]}, key=order.__getitem__)
        found.append((order[layers[0]], int(roots[units[0]]), matrices, members, layers))
    taken: dict[str, int] = {}
    for place, unit, matrices, members, layers in sorted(found, key=lambda f: f[:2]):
        # Named after the producing weight: the one read by the earliest layer.
        t, _ = min(matrices, key=lambda m: (min(order[n] for n in touching[m[0]]), m[1]))
        taken[t.name] = taken.get(t.name, 0) + 1
        name = t.name if taken[t.name] == 1 else f"{t.name}#{taken[t.name]}"
        yield (place, unit), Group(name, len(next(iter(members.values()))), members, tuple(layers))
