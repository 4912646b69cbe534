"""Records of engine files whose probe passed on this machine, so that the next load of the same file does not run it again.

A record is a file in the user's cache folder, empty unless it is one of a build (builder/verify/repeated.py). Its name is a digest of everything
that the probe depends on: the digest of the engine file (which covers the digests of all its sections), the device and its libraries, the versions
of Python and NumPy, and whet's own sources with those of its kernels. Any difference is another name, so that the probe runs again. The environment
variable WHET_VERIFIED gives another folder, or is 0: no records.
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path

import numpy as np

import whet
from whet.backends import Backend
from whet.backends._code_cache import cache_folder, limit_files
from whet.engine.plan import EnginePlan
from whet.errors import BackendError
from whet.files import replace_atomically

VARIABLE = "WHET_VERIFIED"
_MOST_FILES = 4096


def find_record(plan: EnginePlan, digest: str, backend: Backend, libraries: Mapping[str, str]) -> Path | None:
    """The file that exists if the engine with this digest was verified here; None if there can be no record: the plan is not from a file (no
    digest), it uses plugins (whose sources are not known), records are turned off, or another user can write to their folder. `libraries` are
    the versions of the tactics' libraries."""
    if not digest or plan.plugins or os.environ.get(VARIABLE) == "0":
        return None
    try:
        folder = cache_folder(VARIABLE, "verified")
    except (OSError, BackendError):
        return None
    parts = [digest, backend.key(), str(backend.threads), str(sorted(libraries.items())), sys.version, np.__version__, digest_source_files()]
    return folder / hashlib.sha256("\0".join(parts).encode()).hexdigest()


def write_record(record: Path, content: bytes = b"") -> None:
    """Notes that the engine was verified. A full or read-only disk is no error: it is then verified again."""
    with suppress(OSError):
        with replace_atomically(record) as part:
            part.write_bytes(content)
        limit_files(record.parent, _MOST_FILES)


def is_recorded(record: Path | None) -> bool:
    """True if the record exists and is this user's."""
    if record is None:
        return False
    try:
        return record.stat().st_uid == os.getuid()
    except OSError:
        return False


def read_digest(plan: EnginePlan) -> str:
    """The digest in the head of a plan's engine file: of its table, which has the digests of all sections."""
    return "" if plan.data is None else bytes(plan.data[32:64]).hex()


@cache
def digest_source_files() -> str:
    """A digest of the names, sizes and times of whet's source files: another version, or a changed checkout, has another one."""
    files = sorted(_list_files(Path(whet.__file__).parent))
    return hashlib.sha256(repr((getattr(whet, "__version__", ""), files)).encode()).hexdigest()


def _list_files(folder: Path | str) -> Iterator[tuple[str, int, int]]:
    with os.scandir(folder) as scan:
        entries = list(scan)
    for entry in entries:
        if entry.is_dir(follow_symlinks=False):
            if entry.name != "__pycache__":
                yield from _list_files(entry.path)
        elif not entry.name.endswith((".pyc", ".pyo")):
            info = entry.stat()
            yield entry.path, info.st_size, info.st_mtime_ns
