"""The progress bar of a build: which stage, what is being timed now, how long it will take. On standard error, only on a terminal."""

from __future__ import annotations

from typing import Any


class BuildProgress:
    """A builder's Progress on a rich bar; a context manager. Disabled, it only collects notes."""

    def __init__(self, enabled: bool = True):
        self.enabled = enabled
        self.notes: list[str] = []
        self._bar: Any = None
        self._task: Any = None

    def __enter__(self) -> BuildProgress:
        if self.enabled:
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

            self._bar = Progress(
                TextColumn("{task.description:<14}"),
                BarColumn(bar_width=30),
                MofNCompleteColumn(),
                TimeRemainingColumn(),
                TextColumn("[dim]{task.fields[what]}"),
                console=Console(stderr=True),
                transient=True,
            )
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def stage(self, name: str, total: int) -> None:
        if self._bar is None:
            return
        if self._task is not None:
            self._bar.remove_task(self._task)
        self._task = self._bar.add_task(name, total=total, what="")

    def step(self, what: str, done: int = 1) -> None:
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, advance=done, what=what[:80])

    def note(self, text: str) -> None:
        self.notes.append(text)
