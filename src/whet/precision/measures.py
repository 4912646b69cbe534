"""Error measures between low-precision and FP32 values: signal-to-noise ratio, cosine. All in float64."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

#: dB reported for identical values, so that tables and JSON hold finite numbers.
EXACT_DB = 200.0
Values = Mapping[str, np.ndarray]


def compute_powers(want: np.ndarray, got: np.ndarray) -> tuple[float, float]:
    """Signal power (sum of squares of `want`) and noise power (of the difference); a NaN or infinity on one side only is infinite noise."""
    a, b = np.asarray(want, np.float64), np.asarray(got, np.float64)
    finite = np.isfinite(a)
    if not np.array_equal(finite, np.isfinite(b)):
        return float(np.sum(a[finite] ** 2)), np.inf
    a, b = a[finite], b[finite]
    return float(np.sum(a * a)), float(np.sum((a - b) ** 2))


def to_decibels(signal: float, noise: float) -> float:
    """10 log10(signal / noise), at most EXACT_DB, at least -EXACT_DB."""
    if noise <= 0:
        return EXACT_DB
    if signal <= 0 or not np.isfinite(noise):
        return -EXACT_DB
    return float(np.clip(10 * np.log10(signal / noise), -EXACT_DB, EXACT_DB))


def compute_cosine(want: np.ndarray, got: np.ndarray) -> float:
    """Cosine similarity of two flattened tensors; 1 for two zero tensors."""
    a, b = np.asarray(want, np.float64).reshape(-1), np.asarray(got, np.float64).reshape(-1)
    if not (np.isfinite(a).all() and np.isfinite(b).all()):
        return 1.0 if np.array_equal(a, b, equal_nan=True) else -1.0
    scale = float(np.linalg.norm(a) * np.linalg.norm(b))
    if scale == 0:
        return 1.0 if np.array_equal(a, b) else 0.0
    return float(a @ b / scale)


def compute_output_snr(wants: Sequence[Values], gots: Sequence[Values]) -> float:
    """SNR in dB of the worst float output; powers are summed over the samples first."""
    worst = EXACT_DB
    for name, first in wants[0].items():
        if np.asarray(first).dtype.kind in "fV":
            pairs = [compute_powers(w[name], g[name]) for w, g in zip(wants, gots, strict=True)]
            worst = min(worst, to_decibels(sum(s for s, _ in pairs), sum(n for _, n in pairs)))
    return worst


def compute_output_cosine(wants: Sequence[Values], gots: Sequence[Values]) -> float:
    """Mean cosine over the samples of the worst float output."""
    names = [n for n, a in wants[0].items() if np.asarray(a).dtype.kind in "fV"]
    means = [float(np.mean([compute_cosine(w[n], g[n]) for w, g in zip(wants, gots, strict=True)])) for n in names]
    return min(means, default=1.0)
