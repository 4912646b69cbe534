"""Histograms of tensor values: fixed bins taken from the float's bit pattern, and exact extremes.

A bin holds all f32 values with the same upper 16 bits: sign, exponent and 7 mantissa bits (0.8 % wide). Bins are the same for every
tensor and batch and counts are integers, so merging histograms is exact in any order.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache

import numpy as np

from whet.errors import CalibrationError

BINS = 1 << 16


@cache
def compute_bin_centres() -> tuple[np.ndarray, np.ndarray]:
    """Centre and largest magnitude of each bin of positive values."""
    start = np.arange(BINS // 2, dtype=np.uint32) << np.uint32(16)
    with np.errstate(invalid="ignore"):  # the last bins stand for NaN, which is never counted
        low, high = (b.view(np.float32).astype(np.float64) for b in (start, start | np.uint32(0xFFFF)))
    return (low + high) / 2, high


@dataclass
class Histogram:
    """Value counts of one tensor over the calibration data."""

    counts: np.ndarray = field(default_factory=lambda: np.zeros(BINS, np.int64))
    low: float = np.inf
    high: float = -np.inf

    @property
    def total(self) -> int:
        """Number of values counted."""
        return int(self.counts.sum())

    @property
    def largest(self) -> float:
        """The exact largest magnitude."""
        return max(-self.low, self.high)

    def add(self, a: np.ndarray, tensor: str = "") -> None:
        """Adds the values of `a` (any float type). Raises CalibrationError, naming the tensor, for NaN and infinities."""
        flat = np.ascontiguousarray(a, np.float32).reshape(-1)
        if not flat.size:
            return
        if not np.isfinite(flat).all():
            what = "NaN" if np.isnan(flat).any() else "infinite values"
            raise CalibrationError(
                f"%{tensor} holds {what} in calibration data. Check the preprocessing of the data, or leave the layers that read it in "
                "floating point with --layerPrecisions=NAME:fp32."
            )
        self.counts += np.bincount((flat.view(np.uint32) >> np.uint32(16)).astype(np.int64), minlength=BINS)
        self.low, self.high = min(self.low, float(flat.min())), max(self.high, float(flat.max()))

    def merge(self, other: Histogram) -> None:
        """Adds the counts of `other`."""
        self.counts += other.counts
        self.low, self.high = min(self.low, other.low), max(self.high, other.high)

    def magnitudes(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Non-empty bins by magnitude: centre, largest magnitude, count (both signs combined)."""
        half = BINS // 2
        counts = self.counts[:half] + self.counts[half:]
        at = np.flatnonzero(counts)
        middles, tops = compute_bin_centres()
        return middles[at], np.minimum(tops[at], self.largest), counts[at]
