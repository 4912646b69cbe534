"""The current stage of a search job: a line in a file of its folder, read by the parent process, time limits and the live table."""

from __future__ import annotations

from pathlib import Path

STAGE = "stage.txt"
WAITING = "waiting for the device"  # a stage excluded from time limits


def find_stage(folder: Path) -> str:
    """The current stage of a job; empty before the first one."""
    try:
        return (folder / STAGE).read_text(encoding="utf-8")
    except OSError:
        return ""
