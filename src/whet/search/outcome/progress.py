"""What a search tells while it works; the terminal's view, JSON lines and tests listen."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol


class Watcher(Protocol):
    """Told by the loop, from its own thread."""

    def plan(self, facts: Mapping[str, Any]) -> None:
        """Before anything runs: `trials`, `survivors`, `baselines`, `resumed`, `space`, `target`, `left_out`, `done` (of an earlier call)."""

    def phase(self, name: str, total: int) -> None:
        """A phase begins: baselines, scouts, survivors, comparison, deploy; with how many jobs."""

    def begun(self, folder: Path, what: str) -> None:
        """A job begins; `folder`/stage.txt says what it is busy with."""

    def ended(self, folder: Path, result: Mapping[str, Any], again: bool) -> None:
        """A job has a result; `again`: it is the same as that of an earlier job, or was found finished."""

    def tick(self) -> None:
        """Called about five times a second while jobs run."""

    def note(self, text: str) -> None:
        """Something the user should know."""


class Silent:
    """Keeps the notes and says nothing."""

    def __init__(self) -> None:
        self.notes: list[str] = []

    def plan(self, facts: Mapping[str, Any]) -> None: ...

    def phase(self, name: str, total: int) -> None: ...

    def begun(self, folder: Path, what: str) -> None: ...

    def ended(self, folder: Path, result: Mapping[str, Any], again: bool) -> None: ...

    def tick(self) -> None: ...

    def note(self, text: str) -> None:
        self.notes.append(text)
