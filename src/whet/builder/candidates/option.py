"""An option: one planned way to run a layer, and what is known of its time."""

from __future__ import annotations

from dataclasses import dataclass

from whet.engine.report import Candidate
from whet.tactics import Config, Kernel, Signature, Tactic

#: (tactic, signature, config) as text: what a ban or a lock names
Ident = tuple[str, str, Config]


@dataclass
class Option:
    """One planned way to run a layer. `ms` is None until it is timed; `estimate_ms` stands in where nothing is timed.

    `cold_ms` is the time of a finalist whose weights are not in the cache, `rank_ms` what options of its layer are compared by then (timing.py).
    """

    tactic: Tactic
    signature: Signature
    config: Config
    kernel: Kernel
    rank: int  # place in the listing: earlier is kept when times do not differ
    estimate_ms: float = 0.0
    ms: float | None = None
    spread_ms: float = 0.0
    cold_ms: float | None = None
    cold_spread_ms: float = 0.0
    rank_ms: float | None = None
    note: str = ""
    texts: tuple[str, ...] = ()  # what it compiles, until it is known whether that is needed

    @property
    def ident(self) -> Ident:
        return (self.tactic.name, str(self.signature), self.config)

    @property
    def cost(self) -> float:
        """Milliseconds as far as they are known."""
        return next(ms for ms in (self.rank_ms, self.ms, self.estimate_ms) if ms is not None)

    @property
    def noise_ms(self) -> float:
        """What `cost` varies by."""
        return self.spread_ms if self.cold_ms is None else self.cold_spread_ms

    def candidate(self, reason: str = "") -> Candidate:
        """For the report."""
        return Candidate(
            self.tactic.name,
            str(self.signature),
            tuple(self.config),
            self.kernel.implementation,
            self.ms,
            self.spread_ms if self.ms is not None else None,
            reason or self.note,
        )
