"""What a candidate is judged by: top-1 accuracy on labelled data, or a function of the user's; with how sure the number is.

A metric function is called as `metric(predict)`, where `predict({input: array}) -> {output: array}` runs the engine on any number of
samples. It returns a number, or a score for each sample (a 1-D array, whose mean is the value). One with a second parameter is called as
`metric(predict, which)`, where `which` is "score" while the search goes on and "judge" in the last comparison: data that nothing was chosen by.
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
_Z = 1.959964  # of the 95 % interval


@dataclass(frozen=True)
class Score:
    """A metric's value with its 95 % interval (None where the metric gave one number only) over how many samples."""

    value: float
    low: float | None = None
    high: float | None = None
    samples: int | None = None
    each: np.ndarray | None = None  # score of each sample, for paired comparisons

    def to_plain(self) -> dict[str, Any]:
        return {"value": self.value, "low": self.low, "high": self.high, "samples": self.samples}


def top1(predict: Predict, data: Labelled) -> Score:
    """Per cent of the samples whose largest output is their label; Wilson's interval.

    The output is the one with two axes [n, classes] (or more of size 1). Raises ShapeError when there is none, or more than one,
    CalibrationError for labels that are no classes of it.
    """
    outputs = predict(data.inputs)
    rows = {n: a for n, a in outputs.items() if a.ndim >= 2 and len(a) == len(data) and max(a.shape[2:], default=1) == 1}
    fitting = {n: np.reshape(a, (len(data), -1)) for n, a in rows.items()}
    if len(fitting) != 1:
        shapes = ", ".join(f"{n} {list(a.shape)}" for n, a in outputs.items())
        raise ShapeError(f"top1 needs one output of a row of scores a sample; the model gives {shapes}. Give a metric function instead.")
    (scores,) = fitting.values()
    if len(data) and not 0 <= data.labels.min() <= data.labels.max() < scores.shape[1]:
        raise CalibrationError(
            f"labels go from {data.labels.min()} to {data.labels.max()}, but the model tells {scores.shape[1]} classes apart: they count from 0"
        )
    right = (scores.argmax(1) == data.labels).astype(np.float64) * 100
    low, high = wilson(round(float(right.sum()) / 100), len(right))
    return Score(float(right.mean()), 100 * low, 100 * high, len(right), right)


def knows_which(function: Callable[..., Any]) -> bool:
    """Whether a metric function takes `which` beside `predict`: a second parameter of that name, or without a default."""
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):  # of a builtin without a signature
        return False
    second = parameters[1] if len(parameters) > 1 else None
    return second is not None and second.kind in (second.POSITIONAL_ONLY, second.POSITIONAL_OR_KEYWORD) and (
        second.name == "which" or second.default is second.empty)  # fmt: skip


def user_metric(function: Callable[..., Any], predict: Predict, name: str, which: str = "score") -> Score:
    """The value of the user's function. Raises UsageError when it gives no finite number."""
    given = np.asarray(function(predict, which) if knows_which(function) else function(predict))
    if given.dtype.kind not in "fiub" or given.ndim > 1 or not given.size or not np.isfinite(given).all():
        raise UsageError(f"{name} must return a finite number, or one for each sample; it returned {given.tolist()!r:.80}")
    if given.ndim == 0:
        return Score(float(given))
    each = given.astype(np.float64)
    half = _Z * float(each.std(ddof=1)) / sqrt(len(each)) if len(each) > 1 else 0.0
    return Score(float(each.mean()), float(each.mean()) - half, float(each.mean()) + half, len(each), each)


def drop(original: Score, made: Score, higher_is_better: bool = True) -> dict[str, float | None]:
    """How much worse `made` is (negative: better), with the 95 % interval of the paired difference where both know their samples."""
    sign = 1.0 if higher_is_better else -1.0
    value = sign * (original.value - made.value)
    if original.each is None or made.each is None or len(original.each) != len(made.each) or len(made.each) < 2:
        return {"value": value, "low": None, "high": None}
    difference = sign * (original.each - made.each)
    half = _Z * float(difference.std(ddof=1)) / sqrt(len(difference))
    return {"value": value, "low": value - half, "high": value + half}


def wilson(right: int, samples: int) -> tuple[float, float]:
    """The 95 % interval of a share, which holds at 0 and 100 % too (Wilson 1927)."""
    p, z2 = right / samples, _Z * _Z
    middle = (p + z2 / (2 * samples)) / (1 + z2 / samples)
    half = _Z * sqrt(p * (1 - p) / samples + z2 / (4 * samples * samples)) / (1 + z2 / samples)
    return max(0.0, middle - half), min(1.0, middle + half)
