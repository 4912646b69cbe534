"""How much each channel of a group matters, from the weights alone: L1 or L2 norms, or random as the baseline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from whet.errors import PruneError
from whet.pruning.coupling import Group

KINDS = ("l1", "l2", "random")


def importance(found: Sequence[Group], kind: str = "l1", seed: int = 0) -> dict[str, np.ndarray]:
    """Scores float64 [size] of each group by name, normalised to a mean of one within the group.

    The score of a channel is the mean over the group's weights of two or more axes (the filters that make it, the columns that
    read it), each normalised by its own mean: a wide layer does not outvote a narrow one.
    Raises PruneError for an unknown kind.
    """
    if kind not in KINDS:
        raise PruneError(f"importance is one of {', '.join(KINDS)}, not {kind!r}")
    rng = np.random.default_rng(seed)
    return {g.name: rng.random(g.size) * 2 if kind == "random" else _norms(g, kind) for g in found}


def _norms(g: Group, kind: str) -> np.ndarray:
    parts = []
    for t, axis, at in g.weights():
        if t.type.rank < 2:
            continue
        slices = np.moveaxis(t.array().astype(np.float64), axis, 0)[at]  # [size, block, rest...]
        flat = np.abs(slices).reshape(g.size, -1)
        norm = flat.sum(1) if kind == "l1" else np.sqrt((flat**2).sum(1))
        if norm.mean() > 0:
            parts.append(norm / norm.mean())
    return np.mean(parts, axis=0) if parts else np.ones(g.size)


def choose(
    found: Sequence[Group],
    scores: Mapping[str, np.ndarray],
    ratio: float,
    *,
    scope: str = "group",
    multiple: int = 8,
    least: int | None = None,
) -> dict[str, np.ndarray]:
    """Which channels to keep so that about `ratio` (0..1) of all go: group name -> sorted indexes, of the groups that lose some.

    `scope` "group" takes the same share of every group, "global" the least important of all groups together. Kept counts are
    rounded to a `multiple` (what kernels like), and at least `least` (default: one multiple) stay.
    Raises PruneError for a ratio or scope that makes no sense.
    """
    if not 0 <= ratio < 1:
        raise PruneError(f"the share of channels to cut is from 0 to below 1, not {ratio}")
    if scope not in ("group", "global"):
        raise PruneError(f"scope is 'group' or 'global', not {scope!r}")
    if multiple < 1:
        raise PruneError(f"kept channels are rounded to a multiple of one or more, not {multiple}")
    least = multiple if least is None else least
    share = {g.name: 1 - ratio for g in found}
    if scope == "global" and found:
        every = np.sort(np.concatenate([scores[g.name] for g in found]))
        threshold = every[int(len(every) * ratio)]
        share = {g.name: float(np.mean(scores[g.name] >= threshold)) for g in found}
    kept = {}
    for g in found:
        n = max(least, round(g.size * share[g.name] / multiple) * multiple)
        if n < g.size:
            best = np.argsort(-scores[g.name], kind="stable")[:n]
            kept[g.name] = np.sort(best)
    return kept
