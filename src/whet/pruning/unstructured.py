"""Unstructured pruning: zeros anywhere in the weights. A baseline: dense kernels cannot skip them, so latency does not improve."""

from __future__ import annotations

import numpy as np

from whet.errors import PruneError
from whet.network import Network, Origin, Tensor, Weight


def zero_smallest(net: Network, fraction: float) -> Network:
    """A copy of `net` with the `fraction` (0..1) of smallest magnitudes in each weight of two or more axes set to zero.

    Raises PruneError for a fraction out of range.
    """
    if not 0 <= fraction <= 1:
        raise PruneError(f"the fraction of weights to set to zero must be from 0 to 1, not {fraction}")
    pruned = net.clone()
    for t in pruned.constants.values():
        if t.type.rank >= 2 and t.dtype.is_float:
            array = t.array().copy()
            order = np.argsort(np.abs(array), axis=None, kind="stable")
            array.reshape(-1)[order[: round(array.size * fraction)]] = 0
            t.weight = Weight(array, Origin("source", t.name))
    return pruned


def compute_zero_fraction(net: Network) -> float:
    """Fraction (0..1) of zeros among the weights of two or more axes; 0 if there are no such weights."""
    arrays = [t.array() for t in list_matrices(net)]
    total = sum(a.size for a in arrays)
    return sum(int(np.count_nonzero(a == 0)) for a in arrays) / total if total else 0.0


def list_matrices(net: Network) -> list[Tensor]:
    """Float constants of two or more axes."""
    return [t for t in net.constants.values() if t.type.rank >= 2 and t.dtype.is_float]
