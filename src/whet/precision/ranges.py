"""Ranges of tensors and the quantization parameters they give: scale, zero point, type."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from whet.network import I8, U8, DType

METHODS = ("minmax", "entropy", "percentile", "mse")
#: Ratio of the two sides of a range from which an asymmetric range (with a zero point) is used.
SKEWED = 3.0


@dataclass(frozen=True)
class Range:
    """The range of values that a tensor's integers represent; values outside saturate. `method` and `error` record how it was selected."""

    low: float
    high: float
    method: str = ""
    error: float | None = None

    @staticmethod
    def within(low: float, high: float, limit: float, method: str = "", *, zero_points: bool = True) -> Range:
        """The range of values in [low, high] clipped at magnitude `limit`: non-negative, symmetric, or (`zero_points`) asymmetric."""
        low, high = max(low, -limit), min(high, limit)
        if low >= 0:
            return Range(0.0, high, method)
        if zero_points and high > 0 and (high > SKEWED * -low or -low > SKEWED * high):
            return Range(low, high, method)
        most = max(-low, high)
        return Range(-most, most, method)

    @property
    def usable(self) -> bool:
        """True if the range is finite, contains 0, has a positive upper end, and its scale is representable in f32."""
        return bool(np.isfinite(self.low) and np.isfinite(self.high) and self.low <= 0 < self.high and self.scale > 0)

    @property
    def dtype(self) -> DType:
        """i8 for a symmetric range, else u8."""
        return I8 if self.low == -self.high else U8

    @property
    def scale(self) -> np.float32:
        """The quantization step."""
        if self.dtype == I8:
            return np.float32(self.high / 127)
        return np.float32((self.high - self.low) / 255)

    @property
    def zero(self) -> int:
        """The zero point."""
        return 0 if self.dtype == I8 or self.low == 0 else int(np.rint(-self.low / float(self.scale)))

    def merge(self, other: Range) -> Range:
        """The union of both ranges."""
        low, high = min(self.low, other.low), max(self.high, other.high)
        skewed = bool(self.zero or other.zero)  # zero points are allowed
        methods = dict.fromkeys((*self.method.split(", "), *other.method.split(", ")))
        return Range.within(low, high, max(-low, high), ", ".join(methods), zero_points=skewed)

    def fake_quantize(self, a: np.ndarray) -> np.ndarray:
        """`a` (f32) quantized and dequantized."""
        lowest, top = (-128, 127) if self.dtype == I8 else (0, 255)
        q = np.clip(np.rint(a / self.scale) + np.float32(self.zero), lowest, top)
        return ((q - np.float32(self.zero)) * self.scale).astype(np.float32)


@dataclass
class Ranges:
    """Ranges by tensor name, with the model digest and the number of calibration samples.

    `scalings` (f32 per channel, by tensor: precision.scaling) were applied before calibration. `corrections` (f32 per output channel, by
    layer: precision.steps) are subtracted from the biases of quantized layers. `rounded` holds adaptively rounded weights by layer (f32,
    precision.rounding); others are rounded to nearest. `float_sums` names the Add layers that FP8 keeps in 16 bits or more
    (precision.float8).
    """

    tensors: dict[str, Range] = field(default_factory=dict)
    model: str = ""
    samples: int = 0
    scalings: dict[str, np.ndarray] = field(default_factory=dict)
    corrections: dict[str, np.ndarray] = field(default_factory=dict)
    rounded: dict[str, np.ndarray] = field(default_factory=dict)
    float_sums: frozenset[str] = frozenset()
