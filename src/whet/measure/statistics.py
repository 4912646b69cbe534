"""Robust statistics of timing samples: typical value, spread, standard error, and the noise of a difference."""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt
from statistics import median

# Of normally distributed samples: the median's standard error is 1.253 sigma / sqrt(n), and half the interquartile range is 0.6745 sigma.
_ERROR_PER_SPREAD = 1.2533 / 0.6745
_ENOUGH_FOR_RANGE = 6  # samples whose range holds the median with at least 95 %


def estimate_typical_time(samples: Sequence[float], disturbed: bool = False) -> float:
    """The median; under external load the lower quartile, since an interrupted sample says nothing about the kernel."""
    return lower_quartile(samples) if disturbed else median(samples)


def lower_quartile(samples: Sequence[float]) -> float:
    """The sample a quarter of the way up; the least of up to four."""
    return sorted(samples)[(len(samples) - 1) // 4]


def spread(samples: Sequence[float]) -> float:
    """Half the interquartile range."""
    s = sorted(samples)
    return (s[(3 * (len(s) - 1)) // 4] - s[(len(s) - 1) // 4]) / 2


def compute_standard_error(samples: Sequence[float]) -> float:
    """The standard error of the median, estimated from the quartiles."""
    return _ERROR_PER_SPREAD * spread(samples) / sqrt(len(samples))


def compute_confidence_interval(samples: Sequence[float], errors: float = 1.96) -> tuple[float, float]:
    """The median plus and minus so many standard errors; 1.96 gives 95 %.

    From six samples on the interval ends at the least and the largest one: the median is between them with a probability of 1 - 2^(1-n), 97 % for
    six. Of fewer samples it may be wider, but it does not fall below zero if no sample does, as no latency.
    """
    middle, margin = median(samples), errors * compute_standard_error(samples)
    low, high = middle - margin, middle + margin
    if len(samples) >= _ENOUGH_FOR_RANGE:
        return max(low, min(samples)), min(high, max(samples))
    return (max(low, 0.0) if min(samples) >= 0 else low), high


def compute_noise(a: Sequence[float], b: Sequence[float], paired: bool = True) -> float:
    """The noise of the difference of two candidates' times: the larger spread of both; if `paired`, at most the spread of their differences
    round by round if both ran in the same rounds, in which a change of clocks slows both alike."""
    alone = max(spread(a), spread(b))
    if not paired or not a or len(a) != len(b):
        return alone
    return min(alone, spread([x - y for x, y in zip(a, b, strict=True)]))
