"""An option: one planned way to run a layer (tactic, signature, configuration, kernel), with its measured times."""

from __future__ import annotations

from dataclasses import dataclass

from whet.engine.plan import Choice
from whet.engine.report import Candidate
from whet.tactics import Config, Kernel, Signature, Tactic, view_shifts

#: (tactic, signature, config): identifies an option in bans and locks
Ident = tuple[str, str, Config]


@dataclass
class Option:
    """One planned way to run a layer. Times are in milliseconds; `ms` is None until the option is timed; `estimate_ms` replaces it if nothing
    is timed.

    `cold_ms` is the time of a finalist with weights out of the cache. `rank_ms` is the time by which options are then compared (timing.py).
    """

    tactic: Tactic
    signature: Signature
    config: Config
    kernel: Kernel
    rank: int  # index in the listing: the earlier of equally fast options is selected
    estimate_ms: float = 0.0
    ms: float | None = None
    spread_ms: float = 0.0
    cold_ms: float | None = None
    cold_spread_ms: float = 0.0
    rank_ms: float | None = None
    note: str = ""
    texts: tuple[str, ...] = ()  # sources to compile, if the option is selected for timing

    @property
    def ident(self) -> Ident:
        return (self.tactic.name, str(self.signature), self.config)

    @property
    def is_view(self) -> bool:
        """True if the option launches nothing: its operands are parts of a larger tensor, or the same bytes."""
        return bool(view_shifts(self.kernel))

    @property
    def cost(self) -> float:
        """The best known time in milliseconds."""
        return next(ms for ms in (self.rank_ms, self.ms, self.estimate_ms) if ms is not None)

    @property
    def noise_ms(self) -> float:
        """The spread of `cost` in milliseconds."""
        return self.spread_ms if self.cold_ms is None else self.cold_spread_ms

    def choice(self) -> Choice:
        """The part of an option that the engine stores."""
        return Choice(
            tactic=self.tactic.name,
            config=tuple(self.config),
            inputs=tuple(None if x is None else (x.format, x.dtype.name) for x in self.signature.inputs),
            outputs=tuple((x.format, x.dtype.name) for x in self.signature.outputs),
            inplace=tuple(self.signature.inplace),
            implementation=self.kernel.implementation,
            rtol=self.kernel.rtol,
            deterministic=self.kernel.deterministic,
        )

    def candidate(self, reason: str = "") -> Candidate:
        """The option as a row of the build report."""
        return Candidate(
            self.tactic.name,
            str(self.signature),
            tuple(self.config),
            self.kernel.implementation,
            self.ms,
            self.spread_ms if self.ms is not None else None,
            reason or self.note,
        )
