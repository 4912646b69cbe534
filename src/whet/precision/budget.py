"""Accuracy budgets: a user-defined metric with the largest drop allowed, or a bound on the error of the outputs.

    python:my_eval:top1:0.5     my_eval.top1(run) -> number, larger is better; it may fall by 0.5 against FP32
    snr:30                      the signal-to-noise ratio of the outputs against FP32 is at least 30 dB
    cosine:0.999                the cosine similarity of the outputs to FP32 is at least 0.999

A metric function receives `run(feeds) -> outputs` (NumPy arrays by name) and brings its own data.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from whet.errors import CalibrationError, UsageError
from whet.precision.measures import Values, compute_output_cosine, compute_output_snr
from whet.registry import import_user_function

Run = Callable[[Mapping[str, np.ndarray]], Mapping[str, np.ndarray]]
Metric = Callable[[Run], float]
_FORMS = "python:MODULE:FUNCTION:MAX_DROP, snr:DB or cosine:LEAST"


@dataclass(frozen=True)
class Verdict:
    """The result of checking a budget: the value, the FP32 value (None for output bounds), and the decision."""

    value: float
    reference: float | None
    holds: bool
    text: str


@dataclass
class Budget:
    """`kind` is "snr", "cosine" or "metric"; `limit` is in dB, the smallest cosine, or the largest drop of the metric below FP32.

    Raises UsageError for an unknown kind or a limit out of range.
    """

    kind: str
    limit: float
    metric: Metric | None = None
    name: str = ""
    _reference: float | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if self.kind not in ("snr", "cosine", "metric") or (self.kind == "metric") != (self.metric is not None):
            raise UsageError(f"an accuracy budget is {_FORMS}; not {self.kind!r}")
        if not np.isfinite(self.limit) or (self.kind == "cosine" and not -1 <= self.limit <= 1) or (self.kind == "metric" and self.limit < 0):
            raise UsageError(f"an accuracy budget of {self.kind} cannot be {self.limit:g}; it is {_FORMS}")

    @staticmethod
    def parse(text: str) -> Budget:
        """Parses the command-line form. Raises UsageError."""
        parts = text.split(":")
        try:
            limit = float(parts[-1])
        except ValueError:
            raise UsageError(f"--accuracy={text}: the last part is not a number; expected {_FORMS}") from None
        if len(parts) == 4 and parts[0] == "python":
            return Budget("metric", limit, import_user_function(text.rpartition(":")[0], f"--accuracy={text}"), f"{parts[1]}:{parts[2]}")
        if len(parts) == 2 and parts[0] in ("snr", "cosine"):
            return Budget(parts[0], limit)
        raise UsageError(f"--accuracy={text} is none of {_FORMS}")

    @property
    def text(self) -> str:
        """The budget as text for reports."""
        if self.kind == "metric":
            return f"{self.name or 'the metric'} may fall by {self.limit:g}"
        return f"output SNR at least {self.limit:g} dB" if self.kind == "snr" else f"output cosine at least {self.limit:g}"

    def judge(self, run: Run, reference: Run, samples: Sequence[Values], wants: Sequence[Values] | None = None) -> Verdict:
        """Checks `run` against `reference` (FP32). `wants` are the reference outputs of `samples`, computed here when None.

        Raises CalibrationError for a metric that is not finite, and when there are no samples to compare outputs on.
        """
        if self.metric is not None:
            if self._reference is None:
                self._reference = _check_number(self.metric(reference), self.name)
            value = _check_number(self.metric(run), self.name)
            drop = self._reference - value
            return Verdict(value, self._reference, drop <= self.limit + 1e-12, f"{value:g} against FP32's {self._reference:g}")
        if not samples:
            raise CalibrationError("an accuracy budget on the outputs needs calibration samples to compare them on: give --calibData")
        wants = [reference(f) for f in samples] if wants is None else wants
        gots = [run(f) for f in samples]
        value = compute_output_snr(wants, gots) if self.kind == "snr" else compute_output_cosine(wants, gots)
        return Verdict(value, None, value >= self.limit, f"{value:.1f} dB" if self.kind == "snr" else f"cosine {value:.5f}")


def _check_number(value: Any, name: str) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise CalibrationError(f"the metric {name} gave {value!r}, which is not a number") from None
    if not np.isfinite(number):
        raise CalibrationError(f"the metric {name} gave {number}: a finite number is needed")
    return number
