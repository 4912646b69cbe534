"""Files that a command is to write: refused before the work is done that they are to hold."""

from __future__ import annotations

import os
from pathlib import Path

from whet.errors import UsageError


def must_be_writable(**files: str | None) -> None:
    """Refuses files (by flag; None: not asked for) whose folder is missing or may not be written in, and one file for two. Raises UsageError."""
    seen: dict[Path, str] = {}
    for flag, path in files.items():
        if path is None:
            continue
        whole = Path(path).resolve()
        if whole.is_dir():
            raise UsageError(f"--{flag}={path} cannot be written: it is a folder. Name a file in it.")
        if (other := seen.setdefault(whole, flag)) != flag and (whole.is_file() or not whole.exists()):
            raise UsageError(f"--{other} and --{flag} are both {path}: the second would take the first one's place. Name two files.")
        folder = whole.parent
        if not folder.is_dir() or not os.access(folder, os.W_OK):
            why = "there is no folder" if not folder.is_dir() else "it may not be written in"
            raise UsageError(f"--{flag}={path} cannot be written: {why} {folder}. Make it first, or name another file.")
