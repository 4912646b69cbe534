"""Measurements of the profiler per layer."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class LayerTimes:
    """Times of one layer in ms, one per iteration. `name` is the display name (the user's source nodes), `layer` the layer's own name."""

    name: str
    layer: str
    times_ms: tuple[float, ...]

    @property
    def total_ms(self) -> float:
        return sum(self.times_ms)

    @property
    def average_ms(self) -> float:
        return self.total_ms / len(self.times_ms) if self.times_ms else 0.0

    @property
    def median_ms(self) -> float:
        from statistics import median  # with fractions and decimal, which running an engine does not need

        return median(self.times_ms) if self.times_ms else 0.0
