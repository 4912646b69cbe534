"""Checks of a command's output files before any work is done."""

from __future__ import annotations

import os
from pathlib import Path

from whet.errors import UsageError
from whet.files import replace_atomically, resolve_path


def check_writable(*reads: str | None, **files: str | None) -> None:
    """Raises UsageError for output files (by flag; None: not requested) in a missing or read-only folder, for one file under two flags,
    and for files that the command also `reads`, which would be overwritten."""
    seen: dict[Path, str] = {}
    kept = {resolve_path(p) for p in reads if p is not None and Path(p).is_file()}
    for flag, path in files.items():
        if path is None:
            continue
        whole = resolve_path(path)
        if whole.is_dir():
            raise UsageError(f"--{flag}={path} cannot be written: it is a folder. Name a file in it.")
        if (other := seen.setdefault(whole, flag)) != flag and (whole.is_file() or not whole.exists()):
            raise UsageError(f"--{other} and --{flag} are both {path}: the second would overwrite the first. Name two files.")
        if whole in kept:
            raise UsageError(f"--{flag}={path} would overwrite a file that this command reads. Name another file.")
        folder = whole.parent
        if not folder.is_dir():
            raise UsageError(f"--{flag}={path} cannot be written: there is no folder {folder}. Create it, or name another file.")
        if not os.access(folder, os.W_OK):
            raise UsageError(f"--{flag}={path} cannot be written: no write permission in {folder}. Name a file in a folder that you may write to.")


def check_page(*reads: str | None, **files: str | None) -> None:
    """As `check_writable`, for pages: raises UsageError also for the extension of another format, and if plotly is not installed."""
    check_writable(*reads, **files)
    for flag, path in files.items():
        if path is not None and Path(path).suffix.lower() not in ("", ".html", ".htm"):
            raise UsageError(f"--{flag}={path}: it is written as an HTML page; name a file that ends in .html")
    if any(path is not None for path in files.values()):
        from whet.report._page import read_library

        read_library()


def write_page(path: str | Path, page: str) -> None:
    """Writes a page. Raises UsageError if the file cannot be written."""
    try:
        with replace_atomically(path) as part:
            part.write_text(page, encoding="utf-8", errors="backslashreplace")  # names of files may hold bytes that are no UTF-8
    except OSError as e:
        raise UsageError(f"cannot write {path}: {e.strerror}; choose another path") from e
