"""Targets: how small or fast a pruned network must be, as users write it: `--latency=0.5x`, `--latency=3.2ms`, `--flops=0.4x`."""

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
    """A bound on one cost. `ratio` is of what it was; else `value` is milliseconds, inferences a second, FLOPs or parameters.

    Raises PruneError for a kind there is not, and unless exactly one of the two is given, above 0.
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
        """`0.5x` and `50%` are of what it was (a throughput of `2x` is twice as many), a number or `3.2ms` is absolute. Raises PruneError."""
        m = _VALUE.fullmatch(text.strip())
        if kind not in KINDS:
            raise PruneError(f"a target is one of {', '.join(KINDS)}, not {kind!r}")
        if m is None or not float(m[1]) > 0:
            raise PruneError(f"--{kind}={text} is no target: write 0.5x or 50% of what it was, or a number above 0 (for latency 3.2ms)")
        number, unit = float(m[1]), (m[2] or "").lower()
        if unit in _MS and kind != "latency":
            raise PruneError(f"--{kind}={text}: only a latency has a time")
        if unit in ("x", "%"):
            ratio = number / (100 if unit == "%" else 1)
            ratio = 1 / ratio if kind == "throughput" else ratio
            if ratio >= 1:
                raise PruneError(f"--{kind}={text} asks for nothing: pruning makes networks smaller, so the target is below 1x (throughput: above)")
            return Target(kind, ratio=ratio)
        if kind == "channels":
            raise PruneError(f"--channels={text}: the share of channels that stay, as 0.6x or 60%")
        return Target(kind, value=number * _MS.get(unit, 1.0))

    def of(self, before: float, batch: int = 1) -> float:
        """The share of the cost that may stay; `before` is its measured or counted size (ms for times, of a run of `batch`).

        Raises PruneError when it is met already.
        """
        if self.value is None:
            return self.ratio or 0.0  # one of the two is there
        wanted = batch * 1e3 / self.value if self.kind == "throughput" else self.value
        if wanted >= before:
            raise PruneError(f"the target of {self.kind} {self.value:g} is met already: the network is at {self._shown(before, batch)}")
        return wanted / before

    def _shown(self, before: float, batch: int) -> str:
        return f"{batch * 1e3 / before:.4g}/s" if self.kind == "throughput" else f"{before:.4g} ms" if self.kind == "latency" else f"{before:,.0f}"
