"""What samples of one thing's time say: its typical value, and by how much the middle of them varies."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median


def typical(samples: Sequence[float], disturbed: bool) -> float:
    """The median; where other programs took the CPUs, the lower quartile: a sample that was interrupted says nothing about the kernel."""
    return sorted(samples)[(len(samples) - 1) // 4] if disturbed else median(samples)


def spread(samples: Sequence[float]) -> float:
    """Half the distance between the quartiles: what the middle of the samples varies by."""
    s = sorted(samples)
    return (s[(3 * (len(s) - 1)) // 4] - s[(len(s) - 1) // 4]) / 2
