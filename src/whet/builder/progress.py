"""What a build says while it works, so that a progress bar can show it, and an ETA can be worked out."""

from __future__ import annotations

from typing import Protocol


class Progress(Protocol):
    """Told by the builder, in this order: `stage`, then `step` up to `total` times, then the next stage.

    Steps of one stage cost about alike, so the time left in a stage is elapsed / done * (total - done).
    """

    def stage(self, name: str, total: int) -> None:
        """A stage begins ("passes", "candidates", "timing", "choice", "whole engines", "verification"); it has `total` steps."""

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
    """Passes everything on to another Progress and keeps the notes for the report."""

    def __init__(self, to: Progress | None):
        self.to: Progress = to or Silent()
        self.notes: list[str] = []

    def stage(self, name: str, total: int) -> None:
        self.to.stage(name, total)

    def step(self, what: str, done: int = 1) -> None:
        self.to.step(what, done)

    def note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)
            self.to.note(text)
