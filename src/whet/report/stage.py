"""What a job of a search says that it is busy with: a line in a file of its folder, which its parent, time limits and the live table read."""

from __future__ import annotations

from pathlib import Path

STAGE = "stage.txt"
WAITING = "waiting for the device"  # a stage that no time limit counts


def stage_of(folder: Path) -> str:
    """What a job is busy with, as it says itself; empty before it says anything."""
    try:
        return (folder / STAGE).read_text(encoding="utf-8")
    except OSError:
        return ""
