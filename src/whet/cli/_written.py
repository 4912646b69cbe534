"""Files that a command is to write: refused before the work is done that they are to hold."""

from __future__ import annotations

import os
from pathlib import Path

from whet.errors import UsageError


def must_be_writable(**files: str | None) -> None:
    """Refuses files (by flag; None: not asked for) whose folder is missing or may not be written in. Raises UsageError."""
    for flag, path in files.items():
        if path is None:
            continue
        folder = Path(path).resolve().parent
        if not folder.is_dir() or not os.access(folder, os.W_OK):
            why = "there is no folder" if not folder.is_dir() else "it may not be written in"
            raise UsageError(f"--{flag}={path} cannot be written: {why} {folder}. Make it first, or name another file.")
