"""Cutting: a network without the removed channels, and the full network with these channels zeroed (its oracle)."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from whet.errors import NetworkError, PruneError
from whet.network import Layer, Network, Tensor, Weight, copy_into, verify
from whet.ops import get_op
from whet.ops._origin import express, make_literal
from whet.pruning.coupling import Axis, Group, find_group, list_groups_for
from whet.pruning.depth import remove_branches, silence_branches

ADDED = ".mean"  # ends the names of means whose correction has taken their name
Kept = Mapping[str, Sequence[int] | np.ndarray]  # group name -> kept channels


def cut(net: Network, kept_channels: Kept, channel_groups: Sequence[Group] | None = None, *, removed: Sequence[str] = ()) -> Network:
    """Returns `net` with only the `kept_channels` of each named group, and without the `removed` branches (depth.py).

    Layers, tensors and weights keep their names; the origin of a cut weight is a Gather of the source weight, so the cut can be
    applied to other values. `channel_groups` are the groups of `net`, if already known. Raises PruneError for an unknown group, invalid or no kept
    channels, and for a layer whose cut form does not have the expected type.
    """
    indexes = find_kept_indices(net, kept_channels, channel_groups)
    if net.stage != "source":
        raise PruneError("only a source network can be cut: cut before lowering, then build again")
    made = Network(net.name, net.stage)
    twin: dict[Tensor, Tensor] = {}
    for t in net.inputs:
        twin[t] = made.add_input(t.name, t.type)
    for t in net.constants.values():
        twin[t] = made.constant(_slice_weight(t, t.constant(), indexes), t.name)
    names = {name for layer in net.layers for name in (layer.name, *(t.name for t in layer.outputs))}
    for layer in net.layers:
        _cut_layer(layer, made, twin, indexes, names)
    made.outputs = [twin[t] for t in net.outputs]
    made.metadata = dict(net.metadata)
    made.prune_dead()  # the old constant of a rewritten shape is dead
    return remove_branches(made, removed) if removed else verify(made)


def zero_channels(net: Network, kept_channels: Kept, channel_groups: Sequence[Group] | None = None, *, removed: Sequence[str] = ()) -> Network:
    """Returns `net` at full size with the weights of removed channels set to zero and `removed` branches multiplied by zero: equivalent to
    `cut`."""
    indexes = find_kept_indices(net, kept_channels, channel_groups)
    made = silence_branches(net, removed) if removed else net.clone()
    for t in net.constants.values():
        if not t.dtype.is_float or not any((t, i) in indexes for i in range(t.type.rank)):
            continue
        array = t.array().copy()
        for i in range(t.type.rank):
            if (t, i) in indexes:
                gone = np.setdiff1d(np.arange(array.shape[i]), indexes[t, i])
                array[(slice(None),) * i + (gone,)] = 0
        made.constants[t.name].weight = Weight(array)
    return made


def find_kept_indices(net: Network, kept_channels: Kept, channel_groups: Sequence[Group] | None = None) -> dict[Axis, np.ndarray]:
    """Sorted kept indices of every affected axis. Raises PruneError."""
    known = list(channel_groups) if channel_groups is not None else list_groups_for(net, kept_channels)
    gone: dict[Axis, list[np.ndarray]] = {}
    for name, channels in kept_channels.items():
        g = find_group(known, name)
        at = np.asarray(channels)
        if at.ndim != 1 or not len(at) or (at.dtype.kind not in "iu"):
            raise PruneError(f"group {name!r}: the kept channels must be a non-empty list of integers, not {channels!r}"[:300])
        if at.min() < 0 or at.max() >= g.size or len(np.unique(at)) != len(at):
            raise PruneError(
                f"group {name!r} has channels 0 to {g.size - 1}, each at most once; {sorted(at.tolist())[:12]}... is invalid"
            )
        lost = np.setdiff1d(np.arange(g.size), at)
        if len(lost):
            for axis, members in g.members.items():
                gone.setdefault(axis, []).append(members[lost].reshape(-1))
    indexes = {}
    for (t, i), lost_here in gone.items():
        indexes[t, i] = np.setdiff1d(np.arange(t.shape[i]), np.concatenate(lost_here))
        if not len(indexes[t, i]):
            raise PruneError(f"axis {i} of %{t.name} would be empty: keep at least one channel of one of its groups")
    return indexes


def _slice_weight(t: Tensor, weight: Weight, indexes: Mapping[Axis, np.ndarray]) -> Weight:
    """The weight with the kept indices only, with a Gather as origin."""
    for i in range(t.type.rank):
        if (t, i) in indexes:
            weight = express("Gather", weight, make_literal(indexes[t, i].astype(np.int64)), axis=i)
    return weight


def get_original_name(name: str) -> str:
    """The name of the original's layer from which a layer of the cut network stems."""
    return re.sub(rf"({re.escape(ADDED)})+$", "", name)


def _cut_layer(
    layer: Layer, net: Network, twin: dict[Tensor, Tensor], indexes: Mapping[Axis, np.ndarray], names: Collection[str]
) -> None:
    """Adds the layer on the cut tensors with the changes that its op declares. `names` are those of the original."""
    tensors = [t for t in (*layer.inputs, *layer.outputs) if t is not None]
    here = {(t, i): indexes[t, i] for t in tensors for i in range(t.type.rank) if (t, i) in indexes}
    recut = get_op(layer.op).recut
    change: dict[str | int, Any] = recut(layer, here) if recut is not None and here else {}
    attrs = {**layer.attrs, **{k: v for k, v in change.items() if isinstance(k, str)}}
    inputs: list[Tensor | None] = [None if t is None else _restore_size(t, layer, net, twin) for t in layer.inputs]
    for place, value in change.items():
        if isinstance(place, int):
            inputs += [None] * (place + 1 - len(inputs))
            inputs[place] = None if value is None else net.constant(np.asarray(value), f"{layer.name}.{place}")
    while inputs and inputs[-1] is None:
        inputs.pop()
    regions = {k: copy_into(r, Network(r.name, r.stage), twin) for k, r in layer.regions.items()}
    share = _compute_kept_share(layer, here)
    name, outputs = layer.name, [t.name for t in layer.outputs]
    while share != 1 and name in names:
        name, outputs = f"{name}{ADDED}", []
    try:
        new = net.add_layer(layer.op, inputs, attrs, name=name, outputs=outputs, regions=regions, sources=layer.sources)
        if share != 1:
            factor = net.constant(np.asarray(share, new.output.dtype.numpy), f"{name}.share")
            new = net.add_layer("Mul", [new.output, factor], name=layer.name, outputs=[layer.output.name], sources=layer.sources)
    except NetworkError as e:
        raise PruneError(f"{layer.op} '{layer.name}' does not accept its cut inputs: {e}. Do not cut the groups that it reads.") from e
    for t, cut_twin in zip(layer.outputs, new.outputs, strict=True):
        want = tuple(len(here[t, i]) if (t, i) in here else d for i, d in enumerate(t.shape))
        if cut_twin.shape != want:
            raise PruneError(
                f"{layer.op} '{layer.name}' gives {cut_twin.type} for its cut inputs, not {t.type.with_shape(want)}: "
                f"it depends on the full size. Do not cut the groups that it reads."
            )
        twin[t] = cut_twin


def _compute_kept_share(layer: Layer, kept_indices: Mapping[Axis, np.ndarray]) -> float:
    """The share of the values that remain of a mean (Op.means): the mean of the remaining ones times it is the original mean."""
    means = get_op(layer.op).means
    if means is None:
        return 1.0
    return math.prod(len(kept_indices[c.a, c.a_axis]) / int(c.a.shape[c.a_axis]) for c in means(layer) if (c.a, c.a_axis) in kept_indices)


def _restore_size(t: Tensor, layer: Layer, net: Network, twin: dict[Tensor, Tensor]) -> Tensor:
    """The cut tensor of an input; the full-size value where a channel count is used as a number rather than a shape.

    Attention that derives its scale from Shape(q), or a mean as sum / Shape(x), keeps computing with the full size. Raises PruneError where
    that depends on a dynamic size.
    """
    now = twin[t]
    if t.is_constant or t.shape_value is None or now.shape_value == t.shape_value or now.shape != t.shape:
        return now
    if not t.dtype.is_float and t.dtype.kind != "bool" and not (get_op(layer.op).pointwise and layer.output.shape_value is None):
        return now
    if not all(isinstance(v, int) for v in t.shape_value):
        raise PruneError(
            f"{layer.op} '{layer.name}' computes with {t}, which depends on cut channels and a dynamic size. Do not cut the groups that it counts."
        )
    values = np.array(t.shape_value, np.float64 if t.dtype.is_float else np.int64).reshape([int(d) for d in t.shape])
    return net.constant(values.astype(t.dtype.numpy), f"{t.name}.before")
