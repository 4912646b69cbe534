"""Channel permutations for 2:4 masks, carried through the network: the producers of the channels write them in the new order, so that nothing is
reordered at run time and the network computes the same function.

Channels that are coupled (coupling.py) move together. All weights that read a group along their reduction axis, in whole aligned groups of four,
decide on its order.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from time import perf_counter

import numpy as np

from whet.network import Network, Tensor, Weight, verify
from whet.ops._origin import express, make_literal
from whet.pruning.coupling import Group, groups
from whet.pruning.sensitivity import Progress
from whet.sparsity import find_reduction_axis, is_two_four
from whet.sparsity.permutation import compute_kept_sum, find_best_order

Scores = Callable[[str, np.ndarray, int], np.ndarray]  # (layer, weights, reduction axis) -> scores in the layout of the weights


@dataclass(frozen=True)
class Permuted:
    """A network with channels in another order, and by group: the order (int64 [channels]: the old index of each channel), and the scores that
    2:4 masks keep before and after, relative to the sum of all scores (0..1)."""

    network: Network
    orders: Mapping[str, np.ndarray]
    kept: Mapping[str, tuple[float, float]]


def permute_channels(
    net: Network, seconds: float, scores: Scores | None = None, *, skip: Collection[str] = (), progress: Progress | None = None
) -> Permuted:
    """A copy of `net` (source stage) whose channels are in an order for which 2:4 masks keep the largest scores (default: magnitudes).

    The search ends after `seconds`. Layers in `skip` have no say. Groups that a layer with 2:4 weights reads are left, since another order breaks
    its pattern.
    """
    scores = scores or (lambda layer, array, axis: np.abs(np.asarray(array, np.float32)))
    readers = list_readers(net, skip)
    plain = [g for g in groups(net) if "@" not in g.name and g.size % 4 == 0 and g.size > 4]
    found = [(g, m) for g in plain if (m := concatenate_scores(g, readers, scores)) is not None]
    patterned = {w for w, axis, _ in readers if is_two_four(w.array(), axis)}
    found = [(g, m) for g, m in found if not any(t in patterned for t, _ in g.members)]
    work = [m.shape[0] * m.shape[1] ** 2 for _, m in found]
    until, orders, kept = perf_counter() + seconds, {}, {}
    for i, (g, matrix) in enumerate(found):
        left = until - perf_counter()
        if left <= 0:
            break
        if progress is not None:
            progress(i, len(found), f"order of {g.name}")
        order = find_best_order(matrix, left * work[i] / sum(work[i:]))
        total, before, after = float(matrix.sum(dtype=np.float64)), compute_kept_sum(matrix), compute_kept_sum(matrix[:, order])
        if after > before:
            orders[g.name], kept[g.name] = order, (before / total, after / total)
    return Permuted(reorder(net, {g.name: orders[g.name] for g, _ in found if g.name in orders}, [g for g, _ in found]), orders, kept)


def reorder(net: Network, orders: Mapping[str, np.ndarray], channel_groups: list[Group] | None = None) -> Network:
    """A copy of `net` with the channels of each named group in another order; it computes the same function."""
    made = net.clone()  # a group's indices are those of the original order, and groups of one axis have disjoint indices
    for g in channel_groups if channel_groups is not None else groups(net):
        if g.name not in orders:
            continue
        for (t, axis), members in g.members.items():
            if not t.is_constant:
                continue
            index = np.arange(t.shape[axis])
            index[members.reshape(-1)] = members[orders[g.name]].reshape(-1)
            constant = made.constants[t.name]
            weight: Weight = constant.constant()
            constant.weight = express("Gather", weight, make_literal(index.astype(np.int64)), axis=axis)
    return verify(made)


def list_readers(net: Network, skip: Collection[str]) -> list[tuple[Tensor, int, str]]:
    """(weight, reduction axis, layer) of the layers with weights of which four inputs may be adjacent."""
    found = []
    for layer in net.layers:
        place = find_reduction_axis(layer)
        if place is not None and layer.name not in skip and place[0].shape[place[1]] % 4 == 0 and place[0].dtype.is_float:
            found.append((*place, layer.name))
    return found


def concatenate_scores(g: Group, readers: list[tuple[Tensor, int, str]], scores: Scores) -> np.ndarray | None:
    """The scores of all weights that read the group, float32 [rows, channels of the group]; None if there are none."""
    parts = []
    for w, axis, name in readers:
        members = g.members.get((w, axis))
        if members is None or members.shape[1] != 1 or members[0, 0] % 4 or (np.diff(members[:, 0]) != 1).any():
            continue
        at = np.moveaxis(scores(name, w.array(), axis), axis, -1)[..., members[0, 0] : members[-1, 0] + 1]
        parts.append(at.reshape(-1, g.size).astype(np.float32))
    return np.concatenate(parts) if parts else None
