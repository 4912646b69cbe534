"""Checks of a command's output files before any work is done."""

from __future__ import annotations

import os
from pathlib import Path

from whet.errors import UsageError


def check_writable(*reads: str | None, **files: str | None) -> None:
    """Raises UsageError for output files (by flag; None: not requested) in a missing or read-only folder, for one file under two flags,
    and for files that the command also `reads`, which would be overwritten."""
    seen: dict[Path, str] = {}
    kept = {Path(p).resolve() for p in reads if p is not None and Path(p).is_file()}
    for flag, path in files.items():
        if path is None:
            continue
        whole = Path(path).resolve()
        if whole.is_dir():
            raise UsageError(f"--{flag}={path} cannot be written: it is a folder. Name a file in it.")
        if (other := seen.setdefault(whole, flag)) != flag and (whole.is_file() or not whole.exists()):
            raise UsageError(f"--{other} and --{flag} are both {path}: the second would overwrite the first. Name two files.")
        if whole in kept:
            raise UsageError(f"--{flag}={path} would overwrite a file that this command reads. Name another file.")
        folder = whole.parent
        if not folder.is_dir() or not os.access(folder, os.W_OK):
            why = "there is no folder" if not folder.is_dir() else "no write permission in"
            raise UsageError(f"--{flag}={path} cannot be written: {why} {folder}. Create it, or name another file.")
