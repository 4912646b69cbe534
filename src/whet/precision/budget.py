"""The accuracy that a user is ready to pay: a metric of their own and how far it may fall, or a bound on the outputs themselves.

    python:my_eval:top1:0.5     my_eval.top1(run) -> number, larger is better; it may fall by 0.5 against FP32
    snr:30                      the outputs' signal to noise against FP32 is at least 30 dB
    cosine:0.999                the outputs' cosine against FP32 is at least 0.999

`run(feeds) -> outputs` is what a metric function gets: inputs and outputs by name, as NumPy arrays. It brings its own data.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from whet.errors import CalibrationError, UsageError
from whet.precision.measures import Values, output_cosine, output_snr
from whet.registry import own_function

Run = Callable[[Mapping[str, np.ndarray]], Mapping[str, np.ndarray]]
Metric = Callable[[Run], float]
_FORMS = "python:MODULE:FUNCTION:MAX_DROP, snr:DB or cosine:LEAST"


@dataclass(frozen=True)
class Verdict:
    """One judgement: the value, FP32's value (None where there is none), whether it is within the budget."""

    value: float
    reference: float | None
    holds: bool
    text: str


@dataclass
class Budget:
    """`kind` is "snr", "cosine" or "metric"; `limit` is dB, the least cosine, or how far the metric may fall below FP32's.

    Raises UsageError for a kind or limit that makes no sense.
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
        """From the command line's form. Raises UsageError."""
        parts = text.split(":")
        try:
            limit = float(parts[-1])
        except ValueError:
            raise UsageError(f"--accuracy={text}: the last part is no number; it is {_FORMS}") from None
        if len(parts) == 4 and parts[0] == "python":
            return Budget("metric", limit, own_function(text.rpartition(":")[0], f"--accuracy={text}"), f"{parts[1]}:{parts[2]}")
        if len(parts) == 2 and parts[0] in ("snr", "cosine"):
            return Budget(parts[0], limit)
        raise UsageError(f"--accuracy={text} is none of {_FORMS}")

    @property
    def text(self) -> str:
        """The budget in words."""
        if self.kind == "metric":
            return f"{self.name or 'the metric'} may fall by {self.limit:g}"
        return f"output SNR at least {self.limit:g} dB" if self.kind == "snr" else f"output cosine at least {self.limit:g}"

    def judge(self, run: Run, reference: Run, samples: Sequence[Values], wants: Sequence[Values] | None = None) -> Verdict:
        """Whether `run` is within the budget against `reference` (FP32). `wants`: the reference's outputs of `samples`, if known.

        Raises CalibrationError for a metric that gives no finite number, or no samples to compare outputs on.
        """
        if self.metric is not None:
            if self._reference is None:
                self._reference = _number(self.metric(reference), self.name)
            value = _number(self.metric(run), self.name)
            drop = self._reference - value
            return Verdict(value, self._reference, drop <= self.limit + 1e-12, f"{value:g} against FP32's {self._reference:g}")
        if not samples:
            raise CalibrationError("an accuracy budget on the outputs needs calibration samples to compare them on: give --calibData")
        wants = [reference(f) for f in samples] if wants is None else wants
        gots = [run(f) for f in samples]
        value = output_snr(wants, gots) if self.kind == "snr" else output_cosine(wants, gots)
        return Verdict(value, None, value >= self.limit, f"{value:.1f} dB" if self.kind == "snr" else f"cosine {value:.5f}")


def _number(value: Any, name: str) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise CalibrationError(f"the metric {name} gave {value!r}, which is no number") from None
    if not np.isfinite(number):
        raise CalibrationError(f"the metric {name} gave {number}: no accuracy can be judged by that")
    return number
