"""Ranges of tensors and the integers that they give: scale, zero point, type."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from whet.network import I8, U8, DType

METHODS = ("minmax", "entropy", "percentile", "mse")
#: One side this many times larger than the other: a zero point is worth its price.
SKEWED = 3.0


@dataclass(frozen=True)
class Range:
    """The values of a tensor that integers shall tell apart; what lies outside saturates. `method` and `error` say how it was chosen."""

    low: float
    high: float
    method: str = ""
    error: float | None = None

    @staticmethod
    def within(low: float, high: float, limit: float, method: str = "", *, zero_points: bool = True) -> Range:
        """The range of values from `low` to `high` cut at magnitude `limit`: from 0 on, or about 0, or (`zero_points`) skewed."""
        low, high = max(low, -limit), min(high, limit)
        if low >= 0:
            return Range(0.0, high, method)
        if zero_points and high > 0 and (high > SKEWED * -low or -low > SKEWED * high):
            return Range(low, high, method)
        most = max(-low, high)
        return Range(-most, most, method)

    @property
    def usable(self) -> bool:
        """Whether integers tell its values apart: finite, from 0 or below to above 0, with a scale that f32 holds."""
        return bool(np.isfinite(self.low) and np.isfinite(self.high) and self.low <= 0 < self.high and self.scale > 0)

    @property
    def dtype(self) -> DType:
        """i8 for a range about 0, else u8."""
        return I8 if self.low == -self.high else U8

    @property
    def scale(self) -> np.float32:
        """The step between two integers' values."""
        if self.dtype == I8:
            return np.float32(self.high / 127)
        return np.float32((self.high - self.low) / 255)

    @property
    def zero(self) -> int:
        """The integer that stands for 0."""
        return 0 if self.dtype == I8 or self.low == 0 else int(np.rint(-self.low / float(self.scale)))

    def merge(self, other: Range) -> Range:
        """The range that holds both."""
        low, high = min(self.low, other.low), max(self.high, other.high)
        skewed = bool(self.zero or other.zero)  # zero points are allowed
        methods = dict.fromkeys((*self.method.split(", "), *other.method.split(", ")))
        return Range.within(low, high, max(-low, high), ", ".join(methods), zero_points=skewed)

    def fake(self, a: np.ndarray) -> np.ndarray:
        """`a` (f32) quantized and dequantized."""
        lowest, top = (-128, 127) if self.dtype == I8 else (0, 255)
        q = np.clip(np.rint(a / self.scale) + np.float32(self.zero), lowest, top)
        return ((q - np.float32(self.zero)) * self.scale).astype(np.float32)


@dataclass
class Ranges:
    """Ranges by tensor name, and what they hold for: the model's digest and how many samples were seen.

    `scalings` (f32 a channel, by tensor: precision.scaling) were applied before the ranges were found; `corrections` (f32 an output
    channel, by layer: precision.steps) are taken off the biases of layers that are quantized. `rounded` are weights by layer that were rounded
    to their scale's numbers with care (precision.rounding), f32; others are rounded to the nearest. `float_sums` names the Add layers that
    FP8 leaves in 16 bits or more: what they read and give is rounded for products alone (precision.float8).
    """

    tensors: dict[str, Range] = field(default_factory=dict)
    model: str = ""
    samples: int = 0
    scalings: dict[str, np.ndarray] = field(default_factory=dict)
    corrections: dict[str, np.ndarray] = field(default_factory=dict)
    rounded: dict[str, np.ndarray] = field(default_factory=dict)
    float_sums: frozenset[str] = frozenset()
