"""Robust statistics of timing samples: typical value, spread, standard error, and the noise of a difference."""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt
from statistics import median

# Of normally distributed samples: the median's standard error is 1.253 sigma / sqrt(n), and half the interquartile range is 0.6745 sigma.
_ERROR_PER_SPREAD = 1.2533 / 0.6745


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


def standard_error(samples: Sequence[float]) -> float:
    """The standard error of the median, estimated from the quartiles."""
    return _ERROR_PER_SPREAD * spread(samples) / sqrt(len(samples))


def confidence_interval(samples: Sequence[float], errors: float = 1.96) -> tuple[float, float]:
    """The median plus and minus so many standard errors; 1.96 gives 95 %.

    The interval ends at the least and the largest sample: the median is between them with a probability of 1 - 2^(1-n), 98 % for seven samples.
    Without this, quartiles of few samples would give latencies below zero.
    """
    middle, margin = median(samples), errors * standard_error(samples)
    return max(middle - margin, min(samples)), min(middle + margin, max(samples))


def compute_noise(a: Sequence[float], b: Sequence[float], paired: bool = True) -> float:
    """The noise of the difference of two candidates' times: the larger spread of both; if `paired`, at most the spread of their differences
    round by round if both ran in the same rounds, in which a change of clocks slows both alike."""
    alone = max(spread(a), spread(b))
    if not paired or not a or len(a) != len(b):
        return alone
    return min(alone, spread([x - y for x, y in zip(a, b, strict=True)]))
