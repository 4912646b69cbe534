"""What a build says while it works, so that a progress bar can show it, and an ETA can be worked out; and where its seconds went."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import Protocol


class Progress(Protocol):
    """Told by the builder, in this order: `stage`, then `step` up to `total` times, then the next stage.

    Steps of one stage cost about alike, so the time left in a stage is elapsed / done * (total - done).
    """

    def stage(self, name: str, total: int) -> None:
        """A stage begins ("passes", "candidates", "timing", "fused or apart", "choice", "whole engines", "verification"; "int8: timing" where
        one of several engines is made); it has `total` steps, 0 where nobody knows how many."""

    def step(self, what: str, done: int = 1) -> None:
        """`done` steps were finished; `what` is worked on now."""

    def note(self, text: str) -> None:
        """Something the user should know: a permission that cannot be used, a busy machine, a banned kernel."""


class Silent:
    """Says nothing, keeps the notes."""

    def __init__(self) -> None:
        self.notes: list[str] = []

    def stage(self, name: str, total: int) -> None:
        pass

    def step(self, what: str, done: int = 1) -> None:
        pass

    def note(self, text: str) -> None:
        self.notes.append(text)


class Noting:
    """Passes everything on to another Progress, keeps the notes for the report, and the seconds of each phase.

    Where that other one is a Noting too, of a build that makes several engines, it hears of their phases.
    """

    def __init__(self, to: Progress | None):
        self.to: Progress = to or Silent()
        self.notes: list[str] = []
        self._engine = ""  # which of several is made now
        self._spent: dict[str, float] = {}
        self._phase, self._since = "start", perf_counter()

    def stage(self, name: str, total: int) -> None:
        self.phase(name)
        self.to.stage(f"{self._engine}: {name}" if self._engine else name, total)

    @contextmanager
    def making(self, engine: str) -> Iterator[None]:
        """What is told inside is about this one of several engines."""
        self._engine = engine
        try:
            yield
        finally:
            self._engine = ""

    def phase(self, name: str) -> None:
        """What is done from now on counts as `name` in `seconds`; every stage begins a phase of its name."""
        now = perf_counter()
        self._spent[self._phase] = self._spent.get(self._phase, 0.0) + now - self._since
        self._phase, self._since = name, now
        if isinstance(self.to, Noting):
            self.to.phase(name)

    @contextmanager
    def within(self, name: str) -> Iterator[None]:
        """What is done inside counts as the phase `name`; then the phase before goes on."""
        before = self._phase
        self.phase(name)
        try:
            yield
        finally:
            self.phase(before)

    def seconds(self) -> dict[str, float]:
        """Seconds of each phase so far, in the order in which they began; what is done again (a kernel was banned) is added up."""
        self.phase(self._phase)
        return {name: s for name, s in self._spent.items() if s}

    def step(self, what: str, done: int = 1) -> None:
        self.to.step(what, done)

    def note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)
            self.to.note(text)
