"""Clipping limits from a histogram (min-max, percentile, MSE, entropy). Deterministic: sums of integers and float64 in a fixed order."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from whet.precision.histogram import Histogram

LEVELS = 128  # distinct magnitudes of 8 bits
_FINE = 2048  # uniform bins for the entropy method
_PERCENTILE = 99.99
_STEPS = 96  # limits that the MSE method tries


def minmax(h: Histogram) -> float:
    """The largest magnitude: nothing saturates."""
    return h.largest


def percentile(h: Histogram) -> float:
    """The magnitude below which 99.99 % of the values are."""
    _, tops, counts = h.magnitudes()
    kept = np.cumsum(counts)
    return float(tops[np.searchsorted(kept, int(np.ceil(kept[-1] * (_PERCENTILE / 100))))])


def mse(h: Histogram) -> float:
    """The limit with the smallest mean squared error of rounding and clipping."""
    middles, _, counts = h.magnitudes()
    best, limit = np.inf, h.largest
    for k in range(_STEPS):
        trial = h.largest * (1 - 0.99 * k / _STEPS)
        step = trial / (LEVELS - 1)
        cut = np.maximum(middles - trial, 0.0)
        error = float(np.sum(counts * cut * cut)) + float(counts[middles <= trial].sum()) * step * step / 12
        if error < best:
            best, limit = error, trial
    return limit


def entropy(h: Histogram) -> float:
    """The limit with the smallest Kullback-Leibler divergence between the original and the quantized distribution (TensorRT's calibrator)."""
    middles, _, counts = h.magnitudes()
    at = np.minimum((middles * (_FINE / h.largest)).astype(np.int64), _FINE - 1)
    fine = np.bincount(at, weights=counts.astype(np.float64), minlength=_FINE)
    fine[0] = fine[1]  # zeros and values near them would dominate
    best, limit = np.inf, _FINE
    for n in range(LEVELS, _FINE + 1, 16):
        p = fine[:n].copy()
        p[-1] += fine[n:].sum()
        held = p > 0
        group = (np.arange(n) * LEVELS) // n
        mass = np.bincount(group, weights=fine[:n], minlength=LEVELS)
        filled = np.bincount(group, weights=held.astype(np.float64), minlength=LEVELS)
        q = np.where(held, mass[group] / np.maximum(filled[group], 1.0), 0.0)
        p, q = p / p.sum(), q / max(q.sum(), 1e-300)
        both = held & (q > 0)
        if p[held & ~both].sum() > 0:
            q = np.where(held & ~both, 1e-9, q)
        divergence = float(np.sum(p[held] * np.log(p[held] / q[held])))
        if divergence < best:
            best, limit = divergence, n
    return h.largest * limit / _FINE


LIMITS: dict[str, Callable[[Histogram], float]] = {"minmax": minmax, "entropy": entropy, "percentile": percentile, "mse": mse}
