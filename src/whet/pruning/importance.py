"""Importance of the units of a group: weight norms, distances, batch-norm scales, Taylor terms on data, or random.

    l1, l2       norms of the weights that produce and read the unit (Li et al. 2017)
    fpgm         distance to the other units of the group; units near the geometric median are redundant (He et al. 2019)
    bn_scale     |gamma| of the batch norms on it (network slimming, Liu et al. 2017); groups without one fall back to l2
    activation   root mean square of its activations on data
    taylor1      first-order change of the loss or outputs on data (Molchanov et al. 2017)
    taylor2      the same to second order (Molchanov et al. 2019)
    reconstruction  increase of the reader's output error after least-squares refitting, on data (reconstruction.py); comparable across groups
    weighted_reconstruction  the same, weighted by the sensitivity of the outputs (or of the loss, with labels) to each of the reader's channels
    random       the baseline
    python:MODULE:FUNCTION   a user function (from Python the function itself): f(net, group) returns one score per unit
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import gcd

import numpy as np

from whet.errors import PruneError
from whet.network import Network
from whet.pruning.coupling import Group
from whet.pruning.depth import Branch
from whet.pruning.reconstruction import compute_reconstruction_scores
from whet.pruning.sensitivity import Gates, Progress, compute_gates
from whet.pruning.sizes import factor_counts
from whet.registry import PYTHON_PREFIX, import_user_function, suggest_name

KINDS = ("l1", "l2", "fpgm", "bn_scale", "activation", "taylor1", "taylor2", "reconstruction", "weighted_reconstruction", "random")
COMPARABLE = ("taylor1", "taylor2", "reconstruction", "weighted_reconstruction")  # scores in one unit for all groups and branches: not normalized
SUMMED_WEIGHTS = 1 << 20  # weights that are added at a time
Own = Callable[[Network | None, Group], np.ndarray]
NEED_DATA = ("activation", "taylor1", "taylor2", "reconstruction", "weighted_reconstruction")


@dataclass(frozen=True)
class Samples:
    """Data for data-driven criteria: inputs by name (samples along axis 0), optional class labels [samples]."""

    data: Mapping[str, np.ndarray]
    labels: np.ndarray | None = None


def importance(
    channel_groups: Sequence[Group],
    kind: str | Own = "l1",
    seed: int = 0,
    *,
    net: Network | None = None,
    samples: Samples | None = None,
    blocks: Sequence[Branch] = (),
    normalize: bool | None = None,
    progress: Progress | None = None,
) -> dict[str, np.ndarray]:
    """Scores float64 [size] of each group by name, and [1] of each branch in `blocks`.

    With `normalize` (the default except for Taylor terms, which are changes of one loss and comparable across groups) the scores of a group
    have mean one, so that layer sizes do not dominate. A norm is the mean over the group's weights with two or more axes, each normalized by
    its mean. The score of a branch is the sum over its groups, or measured on data. Raises PruneError for an unknown kind, or missing data
    or network.
    """
    if isinstance(kind, str) and kind not in KINDS and not kind.startswith(PYTHON_PREFIX):
        raise PruneError(f"importance is one of {', '.join(KINDS)}, or python:MODULE:FUNCTION, not {kind!r}.{suggest_name(kind, KINDS)}")
    if isinstance(kind, str) and kind in NEED_DATA:
        if net is None or samples is None:
            raise PruneError(f"the importance {kind} needs data: give the network and samples (labels are optional)")
        if kind in ("reconstruction", "weighted_reconstruction"):
            return compute_reconstruction_scores(
                net, channel_groups, blocks, samples.data, labels=samples.labels, weighted=kind != "reconstruction", seed=seed, progress=progress
            )
        seen = compute_gates(net, channel_groups, blocks, samples.data, samples.labels, seed=seed, backwards=kind != "activation", progress=progress)
        scores = {name: compute_gate_scores(seen, kind, name) for name in [*(g.name for g in channel_groups), *(b.name for b in blocks)]}
    else:
        scores = _of_weights(channel_groups, kind, seed, net)
    bad = next((name for name, v in scores.items() if not np.isfinite(v).all()), None)
    if bad is not None:
        raise PruneError(f"{name_of(kind)} gives {bad!r} scores that are not finite: its weights or activations hold NaN or "
                         "infinite values. `whet run` shows where they begin.")  # fmt: skip
    if normalize or (normalize is None and kind not in COMPARABLE):
        scores = {**scores, **{g.name: normalize_scores(scores[g.name]) for g in channel_groups}}
    for b in blocks:
        if b.name not in scores:
            inside = set(b.layers)
            own = [float(scores[g.name].sum()) for g in channel_groups if set(g.layers) <= inside]
            scores[b.name] = np.array([sum(own) if own else float(len(b.layers))])
    return scores


def normalize_scores(v: np.ndarray) -> np.ndarray:
    """Scores with mean 1; ones if no score is positive."""
    return v / v.mean() if v.mean() > 0 else np.ones(len(v))


def compute_gate_scores(seen: Gates, kind: str, name: str) -> np.ndarray:
    """The scores of a gate by a criterion that needs data."""
    return np.sqrt(seen.energy[name]) if kind == "activation" else seen.first(name) if kind == "taylor1" else seen.second(name)


def _of_weights(channel_groups: Sequence[Group], kind: str | Own, seed: int, net: Network | None) -> dict[str, np.ndarray]:
    if not isinstance(kind, str) or kind.startswith(PYTHON_PREFIX):
        return _score_by_function(channel_groups, kind, net)
    if kind == "random":
        rng = np.random.default_rng(seed)
        return {g.name: rng.random(g.size) * 2 for g in channel_groups}
    if kind == "bn_scale":
        return _collect_scales(channel_groups, net)
    measure = {"l1": sum_magnitudes, "l2": compute_norms, "fpgm": sum_distances}[kind]
    return {g.name: _score_units(g, measure) for g in channel_groups}


def _score_units(g: Group, measure: Callable[[np.ndarray, int, np.ndarray], np.ndarray]) -> np.ndarray:
    """The mean over the group's weights of `measure(weight, axis, indices [size, block])`, each relative to its mean."""
    parts = []
    for t, axis, at in g.weights():
        if t.type.rank >= 2:
            norm = measure(t.array(), axis, at)
            if norm.mean() != 0:  # NaN propagates
                parts.append(norm / norm.mean())
    return np.mean(parts, axis=0) if parts else np.ones(g.size)


def sum_magnitudes(w: np.ndarray, axis: int, at: np.ndarray) -> np.ndarray:
    """L1 norms of units: of the slices `at` [size, block] of an axis."""
    return sum_slices(np.abs, w, axis)[at].sum(1)


def compute_norms(w: np.ndarray, axis: int, at: np.ndarray) -> np.ndarray:
    """L2 norms of units."""
    return np.sqrt(sum_slices(np.square, w, axis)[at].sum(1))


def sum_slices(f: np.ufunc, w: np.ndarray, axis: int) -> np.ndarray:
    """The sum of f over each slice along an axis, in float64. Works by parts: a copy of the weights of VGG's classifier takes 0.8 GB."""
    total = np.zeros(w.shape[axis])
    rest = tuple(i for i in range(w.ndim) if i != axis)
    step = max(1, SUMMED_WEIGHTS * len(w) // max(w.size, 1))
    for k in range(0, len(w), step):
        sums = f(w[k : k + step].astype(np.float64)).sum(axis=rest)
        if axis == 0:
            total[k : k + step] = sums
        else:
            total += sums
    return total


def sum_distances(w: np.ndarray, axis: int, at: np.ndarray) -> np.ndarray:
    """Sum of Euclidean distances to all other units."""
    rows = np.moveaxis(w.astype(np.float64), axis, 0)[at].reshape(len(at), -1)
    squares = (rows**2).sum(1)
    return np.sqrt(np.maximum(squares[:, None] + squares[None] - 2 * rows @ rows.T, 0)).sum(1)


def _collect_scales(channel_groups: Sequence[Group], net: Network | None) -> dict[str, np.ndarray]:
    if net is None:
        raise PruneError("the importance bn_scale reads batch norms: give the network")
    gammas = {x.inputs[1] for x in net.layers if x.op == "BatchNormalization"}
    scores, with_norm = {}, 0
    for g in channel_groups:
        parts = [np.abs(t.array().astype(np.float64))[at].mean(1) for t, _, at in g.weights() if t in gammas]
        with_norm += bool(parts)
        scores[g.name] = np.mean([normalize_scores(p) for p in parts], axis=0) if parts else _score_units(g, compute_norms)
    if not with_norm:
        raise PruneError("the importance bn_scale needs batch norms, and no group has one (exporters fold them): choose l2 or taylor1")
    return scores


def name_of(kind: str | Own) -> str:
    """The name of a criterion in reports and recipes: its kind, or the name of the user function."""
    return kind if isinstance(kind, str) else f"python:{kind.__module__}:{getattr(kind, '__qualname__', type(kind).__name__)}"


def _score_by_function(channel_groups: Sequence[Group], kind: str | Own, net: Network | None) -> dict[str, np.ndarray]:
    function = import_user_function(kind, "importance") if isinstance(kind, str) else kind
    scores = {}
    for g in channel_groups:
        got = np.asarray(function(net, g), np.float64)
        if got.shape != (g.size,) or not np.isfinite(got).all() or (got < 0).any():
            what = f"{got.shape}" if got.shape != (g.size,) else "scores that are negative or not finite"
            raise PruneError(f"{name_of(kind)} gives {what} for group {g.name!r}: it must give {g.size} finite scores >= 0, one per unit")
        scores[g.name] = got
    return scores


def get_step(g: Group, multiple: int) -> int:
    """Smallest number of units whose channels are a multiple of `multiple`."""
    return multiple // gcd(multiple, g.block)


def choose(
    channel_groups: Sequence[Group],
    scores: Mapping[str, np.ndarray],
    ratio: float,
    *,
    scope: str = "group",
    multiple: int = 8,
    least: int | None = None,
    widths: Mapping[str, int] | None = None,
) -> dict[str, np.ndarray]:
    """Selects the channels to keep so that about `ratio` (0..1) of all are cut: group name -> sorted indices, for affected groups.

    `scope` "group" cuts the same share of every group, "global" the least important units over all groups. Kept counts are rounded to a
    `multiple` of channels (as kernels prefer) with at least `least` units (default: one multiple). Groups in `widths` keep exactly that many
    units. Of an axis that is a product (heads and their width, groups of a convolution and their channels) each of k factors keeps the k-th root of
    the share, so that the axis keeps the share. Raises PruneError for an invalid ratio, scope or width.
    """
    if not 0 <= ratio < 1:
        raise PruneError(f"the share of channels to cut must be in [0, 1), not {ratio}")
    if scope not in ("group", "global"):
        raise PruneError(f"scope is 'group' or 'global', not {scope!r}")
    if multiple < 1:
        raise PruneError(f"kept channels are rounded to a multiple of one or more, not {multiple}")
    given = _check_widths(channel_groups, widths or {})
    share = {g.name: 1 - ratio for g in channel_groups}
    if scope == "global" and channel_groups:
        every = np.sort(np.concatenate([scores[g.name] for g in channel_groups]))
        threshold = every[int(len(every) * ratio)]
        share = {g.name: float(np.mean(scores[g.name] >= threshold)) for g in channel_groups}
    factors = factor_counts(channel_groups)
    share = {name: s ** (1 / factors[name]) for name, s in share.items()}
    kept = {}
    for g in channel_groups:
        step = get_step(g, multiple)
        n = given.get(g.name) or max(step if least is None else least, round(g.size * share[g.name] / step) * step)
        if n < g.size:
            best = np.argsort(-scores[g.name], kind="stable")[:n]
            kept[g.name] = np.sort(best)
    return kept


def _check_widths(channel_groups: Sequence[Group], widths: Mapping[str, int]) -> dict[str, int]:
    """Validates widths: known groups, within their sizes. Raises PruneError."""
    sizes = {g.name: g.size for g in channel_groups}
    for name, n in widths.items():
        if name not in sizes:
            near = suggest_name(name, sizes)
            raise PruneError(f"a width is given for {name!r}, which is not a prunable group.{near} `whet prune MODEL --list` has the names.")
        if not isinstance(n, int) or not 1 <= n <= sizes[name]:
            raise PruneError(f"the width {n} is invalid for {name!r} with {sizes[name]} units: give 1 to {sizes[name]}")
    return dict(widths)
