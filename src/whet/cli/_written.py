"""Files that a command is to write: refused before the work is done that they are to hold."""

from __future__ import annotations

import os
from pathlib import Path

from whet.errors import UsageError


def must_be_writable(*reads: str | None, **files: str | None) -> None:
    """Refuses files (by flag; None: not asked for) whose folder is missing or may not be written in, one file for two, and files that the command
    `reads`: what they hold would be gone. Raises UsageError."""
    seen: dict[Path, str] = {}
    kept = {Path(p).resolve() for p in reads if p is not None and Path(p).is_file()}
    for flag, path in files.items():
        if path is None:
            continue
        whole = Path(path).resolve()
        if whole.is_dir():
            raise UsageError(f"--{flag}={path} cannot be written: it is a folder. Name a file in it.")
        if (other := seen.setdefault(whole, flag)) != flag and (whole.is_file() or not whole.exists()):
            raise UsageError(f"--{other} and --{flag} are both {path}: the second would take the first one's place. Name two files.")
        if whole in kept:
            raise UsageError(f"--{flag}={path} would take the place of a file that is read here, and it would be gone. Name another file.")
        folder = whole.parent
        if not folder.is_dir() or not os.access(folder, os.W_OK):
            why = "there is no folder" if not folder.is_dir() else "it may not be written in"
            raise UsageError(f"--{flag}={path} cannot be written: {why} {folder}. Make it first, or name another file.")
