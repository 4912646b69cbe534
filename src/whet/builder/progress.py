"""Progress of a build: stages and steps for a progress bar and its ETA, notes for the user, and the seconds of each phase."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import Protocol

from whet.progress_lines import ProgressLines, Steps


class Progress(Protocol):
    """Receives calls from the builder in this order: `stage`, then `step` up to `total` times, then the next stage.

    The steps of a stage take about equally long, so its remaining time is elapsed / done * (total - done).
    """

    def stage(self, name: str, total: int) -> None:
        """A stage begins ("passes", "candidates", "timing", "choice", "whole engines", "verification", ...; "int8: timing" if the build makes several
        engines). It has `total` steps, 0 if their number is unknown."""

    def step(self, description: str, done: int = 1) -> None:
        """`done` more steps are finished; `description` describes the current one."""

    def note(self, text: str) -> None:
        """A note for the user: a permission that cannot be used, a busy machine, a banned kernel."""


class Silent:
    """Prints nothing and collects the notes."""

    def __init__(self) -> None:
        self.notes: list[str] = []

    def stage(self, name: str, total: int) -> None:
        pass

    def step(self, description: str, done: int = 1) -> None:
        pass

    def note(self, text: str) -> None:
        self.notes.append(text)


class PrintedProgress(Silent):
    """A context manager that prints a line on standard error every ten seconds (see progress_lines.py) and collects the notes."""

    def __init__(self) -> None:
        super().__init__()
        self._steps = Steps("building")
        self._lines = ProgressLines(self._steps)

    def __enter__(self) -> PrintedProgress:
        self._lines.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._lines.__exit__()

    def stage(self, name: str, total: int) -> None:
        self._steps.name = f"building, {name}"
        self._steps.update(0, total, "")

    def step(self, description: str, done: int = 1) -> None:
        self._steps.update(self._steps.done + done, self._steps.total, description)


class ProgressLog:
    """Forwards all calls to another Progress; collects the notes and the seconds of each phase for the report.

    If the other one is a ProgressLog too, of a build that makes several engines, it receives their phases.
    """

    def __init__(self, to: Progress | None):
        self.to: Progress = to or Silent()
        self.notes: list[str] = []
        self._engine = ""  # name of the engine being built, if there are several
        self._spent: dict[str, float] = {}
        self._phase, self._since = "start", perf_counter()

    def stage(self, name: str, total: int) -> None:
        self.phase(name)
        self.to.stage(f"{self._engine}: {name}" if self._engine else name, total)

    @contextmanager
    def prefix_stages(self, engine: str) -> Iterator[None]:
        """Prefixes the stages inside with the name of one of several engines."""
        self._engine = engine
        try:
            yield
        finally:
            self._engine = ""

    def phase(self, name: str) -> None:
        """Begins a phase of `seconds`; every stage begins a phase of its name."""
        now = perf_counter()
        self._spent[self._phase] = self._spent.get(self._phase, 0.0) + now - self._since
        self._phase, self._since = name, now
        if isinstance(self.to, ProgressLog):
            self.to.phase(name)

    @contextmanager
    def within(self, name: str) -> Iterator[None]:
        """Runs the block as the phase `name`; then the previous phase continues."""
        before = self._phase
        self.phase(name)
        try:
            yield
        finally:
            self.phase(before)

    def seconds(self) -> dict[str, float]:
        """Seconds of each phase so far, in the order of their beginning. Repetitions of a phase (after a ban) are added up."""
        self.phase(self._phase)
        return {name: s for name, s in self._spent.items() if s}

    def step(self, description: str, done: int = 1) -> None:
        self.to.step(description, done)

    def note_all(self, texts: Iterable[str]) -> None:
        for text in texts:
            self.note(text)

    def note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)
            self.to.note(text)
