"""Machine code kept in a folder of the user: folders that another user can write to are not used, because whet runs what they contain."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from whet.errors import BackendError
from whet.files import replace_atomically


def cache_folder(variable: str, name: str) -> Path:
    """The folder in the environment variable, else `name` in the user's cache folder; created if missing.

    Raises BackendError if another user can write to it, OSError if it cannot be created.
    """
    given = os.environ.get(variable)
    if given:
        folder = Path(given)
    else:
        import platformdirs

        folder = Path(platformdirs.user_cache_dir("whet")) / name
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    info = folder.stat()
    if info.st_uid != os.getuid() or info.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise BackendError(
            f"The kernel cache {folder} belongs to another user or can be written by others; whet would run code from it. "
            f"Give {variable} a folder that only you can write."
        )
    return folder


def get_cached_code(path: Path, compile_code: Callable[[], bytes]) -> bytes:
    """The code in the file, else that of `compile_code`, which is then written to it."""
    try:
        info = path.stat()
        if info.st_uid == os.getuid() and info.st_size:
            return path.read_bytes()
    except OSError:
        pass
    code = compile_code()
    with suppress(OSError), replace_atomically(path) as part:  # a full or read-only cache: the kernel is compiled again next time
        part.write_bytes(code)
    return code


def limit_files(folder: Path, most: int) -> None:
    """Deletes the files that were written first if there are more than `most`: half of them, so that it is rarely done."""
    with suppress(OSError):
        files = _list_files(folder)
        if len(files) > most:
            for _, path in sorted(files)[: len(files) - most // 2]:
                Path(path).unlink(missing_ok=True)


def _list_files(folder: Path) -> list[tuple[float, str]]:
    """Times of modification (seconds) and paths of the files in a folder. Other processes rename and delete files meanwhile: those are left out."""
    files = []
    with os.scandir(folder) as entries:
        for entry in entries:
            with suppress(FileNotFoundError):
                if entry.is_file():
                    files.append((entry.stat().st_mtime, entry.path))
    return files
