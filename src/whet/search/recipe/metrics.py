"""Metrics of a candidate: top-1 accuracy on labelled data or a user's function, with confidence intervals.

A metric function is called as `metric(predict)`, where `predict({input: array}) -> {output: array}` runs the engine on any number of
samples. It returns a number, or a 1-D array of scores per sample, whose mean is the value. A function with a second parameter is called as
`metric(predict, which)`, where `which` is "score" during the search and "judge" in the final comparison, on data not used for selection.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import sqrt
from typing import Any

import numpy as np

from whet.errors import CalibrationError, ShapeError, UsageError
from whet.search.recipe.data import Labelled

Predict = Callable[[Mapping[str, np.ndarray]], dict[str, np.ndarray]]
_Z = 1.959964  # normal quantile of the 95 % interval


@dataclass(frozen=True)
class Score:
    """A metric's value, its 95 % interval (None if the metric returned a single number) and the number of samples."""

    value: float
    low: float | None = None
    high: float | None = None
    samples: int | None = None
    each: np.ndarray | None = None  # per-sample scores, for paired comparisons

    def to_plain(self) -> dict[str, Any]:
        return {"value": self.value, "low": self.low, "high": self.high, "samples": self.samples}


def top1(predict: Predict, data: Labelled) -> Score:
    """Top-1 accuracy in per cent, with Wilson's interval.

    The output used is the one of shape [n, classes] (further axes of size 1 allowed). Raises ShapeError if there is none or more than
    one, CalibrationError for labels out of range.
    """
    outputs = predict(data.inputs)
    rows = {n: a for n, a in outputs.items() if a.ndim >= 2 and len(a) == len(data) and max(a.shape[2:], default=1) == 1}
    fitting = {n: np.reshape(a, (len(data), -1)) for n, a in rows.items()}
    if len(fitting) != 1:
        shapes = ", ".join(f"{n} {list(a.shape)}" for n, a in outputs.items())
        raise ShapeError(f"top1 needs one output with a row of scores per sample; the model has {shapes}. Give a metric function instead.")
    (scores,) = fitting.values()
    if len(data) and not 0 <= data.labels.min() <= data.labels.max() < scores.shape[1]:
        raise CalibrationError(
            f"labels go from {data.labels.min()} to {data.labels.max()}, but the model has {scores.shape[1]} classes: labels start at 0"
        )
    right = (scores.argmax(1) == data.labels).astype(np.float64) * 100
    low, high = compute_wilson_interval(round(float(right.sum()) / 100), len(right))
    return Score(float(right.mean()), 100 * low, 100 * high, len(right), right)


def knows_which(function: Callable[..., Any]) -> bool:
    """True if a metric function takes `which`: it has a second parameter of that name or without a default."""
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):  # a builtin without a signature
        return False
    second = parameters[1] if len(parameters) > 1 else None
    return second is not None and second.kind in (second.POSITIONAL_ONLY, second.POSITIONAL_OR_KEYWORD) and (
        second.name == "which" or second.default is second.empty)  # fmt: skip


def call_user_metric(function: Callable[..., Any], predict: Predict, name: str, which: str = "score") -> Score:
    """Calls the user's metric function. Raises UsageError if it does not return finite numbers."""
    returned = np.asarray(function(predict, which) if knows_which(function) else function(predict))
    if returned.dtype.kind not in "fiub" or returned.ndim > 1 or not returned.size or not np.isfinite(returned).all():
        raise UsageError(f"{name} must return a finite number, or one per sample; it returned {returned.tolist()!r:.80}")
    if returned.ndim == 0:
        return Score(float(returned))
    each = returned.astype(np.float64)
    half = _Z * float(each.std(ddof=1)) / sqrt(len(each)) if len(each) > 1 else 0.0
    return Score(float(each.mean()), float(each.mean()) - half, float(each.mean()) + half, len(each), each)


def drop(original: Score, score: Score, higher_is_better: bool = True) -> dict[str, float | None]:
    """How much worse `score` is than the original (negative: better), with the 95 % interval of the paired difference of per-sample scores."""
    sign = 1.0 if higher_is_better else -1.0
    value = sign * (original.value - score.value)
    if original.each is None or score.each is None or len(original.each) != len(score.each) or len(score.each) < 2:
        return {"value": value, "low": None, "high": None}
    difference = sign * (original.each - score.each)
    half = _Z * float(difference.std(ddof=1)) / sqrt(len(difference))
    return {"value": value, "low": value - half, "high": value + half}


def compute_wilson_interval(right: int, samples: int) -> tuple[float, float]:
    """The 95 % interval of a proportion, valid also at 0 and 100 % (Wilson 1927)."""
    p, z2 = right / samples, _Z * _Z
    middle = (p + z2 / (2 * samples)) / (1 + z2 / samples)
    half = _Z * sqrt(p * (1 - p) / samples + z2 / (4 * samples * samples)) / (1 + z2 / samples)
    return max(0.0, middle - half), min(1.0, middle + half)
