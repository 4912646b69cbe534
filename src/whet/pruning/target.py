"""Targets: the size or speed a pruned network must reach, as users write it: `--latency=0.5x`, `--latency=3.2ms`, `--flops=0.4x`."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from whet.errors import PruneError

KINDS = ("latency", "throughput", "flops", "params", "channels")
TIMED = ("latency", "throughput")
_VALUE = re.compile(r"([0-9]*\.?[0-9]+(?:e[+-]?[0-9]+)?)\s*(x|%|ms|us|s)?", re.I)
_MS = {"ms": 1.0, "us": 1e-3, "s": 1e3}


@dataclass(frozen=True)
class Target:
    """An upper bound on one cost: `ratio` is relative to the original; `value` is in milliseconds, inferences per second, FLOPs or parameters.

    Raises PruneError for an unknown kind, and unless exactly one of the two is given and above 0.
    """

    kind: str
    ratio: float | None = None
    value: float | None = None

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise PruneError(f"a target is one of {', '.join(KINDS)}, not {self.kind!r}")
        given = [a for a in (self.ratio, self.value) if a is not None]
        if len(given) != 1 or not 0 < given[0] < math.inf:
            raise PruneError(f"a target of {self.kind} takes either ratio= or value=, above 0, not ratio={self.ratio} and value={self.value}")

    @staticmethod
    def parse(kind: str, text: str) -> Target:
        """`0.5x` and `50%` are relative to the original (throughput `2x`: twice as many), a number or `3.2ms` is absolute. Raises PruneError."""
        m = _VALUE.fullmatch(text.strip())
        if kind not in KINDS:
            raise PruneError(f"a target is one of {', '.join(KINDS)}, not {kind!r}")
        if m is None or not float(m[1]) > 0:
            raise PruneError(f"--{kind}={text} is not a target: write 0.5x or 50% (of the original), or a number above 0 (for latency 3.2ms)")
        number, unit = float(m[1]), (m[2] or "").lower()
        if unit in _MS and kind != "latency":
            raise PruneError(f"--{kind}={text}: only a latency has a unit of time")
        if unit in ("x", "%"):
            ratio = number / (100 if unit == "%" else 1)
            ratio = 1 / ratio if kind == "throughput" else ratio
            if ratio >= 1:
                raise PruneError(f"--{kind}={text} has no effect: pruning reduces cost, so the target must be below 1x (throughput: above)")
            return Target(kind, ratio=ratio)
        if kind == "channels":
            raise PruneError(f"--channels={text}: give the share of channels to keep, as 0.6x or 60%")
        if kind not in TIMED and number < 1:
            raise PruneError(f"--{kind}={text} is less than one of the {kind}: for a share of the original write --{kind}={text.strip()}x")
        return Target(kind, value=number * _MS.get(unit, 1.0))

    def of(self, before: float, batch: int = 1) -> float:
        """The target as a fraction of `before`, the measured or counted cost of the original (times in ms per run of `batch` items).

        Raises PruneError if it is already met.
        """
        if self.value is None:
            return self.ratio or 0.0  # exactly one of the two is given
        wanted = batch * 1e3 / self.value if self.kind == "throughput" else self.value
        if wanted >= before:
            raise PruneError(f"the target of {self.kind} {self.value:g} is already met: the network is at {self._format(before, batch)}")
        return wanted / before

    def _format(self, before: float, batch: int) -> str:
        return f"{batch * 1e3 / before:.4g}/s" if self.kind == "throughput" else f"{before:.4g} ms" if self.kind == "latency" else f"{before:,.0f}"
