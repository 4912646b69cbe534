"""Progress events of a search; implemented by the terminal view, JSON lines and tests."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol


class Watcher(Protocol):
    """Receives progress events on the loop's thread."""

    def plan(self, facts: Mapping[str, Any]) -> None:
        """Called first with `trials`, `survivors`, `baselines`, `resumed`, `space`, `target`, `left_out`, `done` (in an earlier call)."""

    def phase(self, name: str, total: int) -> None:
        """A phase starts (baselines, scouts, survivors, comparison, deploy) with `total` jobs."""

    def start_job(self, folder: Path, description: str) -> None:
        """A job starts; `folder`/stage.txt holds its current stage."""

    def end_job(self, folder: Path, result: Mapping[str, Any], again: bool) -> None:
        """A job has a result; `again`: it duplicates an earlier job or was already finished."""

    def tick(self) -> None:
        """Called about five times a second while jobs run."""

    def note(self, text: str) -> None:
        """A note for the user."""


class Silent:
    """Collects notes and prints nothing."""

    def __init__(self) -> None:
        self.notes: list[str] = []

    def plan(self, facts: Mapping[str, Any]) -> None: ...

    def phase(self, name: str, total: int) -> None: ...

    def start_job(self, folder: Path, description: str) -> None: ...

    def end_job(self, folder: Path, result: Mapping[str, Any], again: bool) -> None: ...

    def tick(self) -> None: ...

    def note(self, text: str) -> None:
        self.notes.append(text)
