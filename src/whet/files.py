"""Writing a file whole or not at all: readers never see half of one, and a full disk costs nothing that was there."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[Path]:
    """A path beside `path` to write to. When the block ends well it takes that name; when it raises it goes, and `path` stays as it was.

    What is no plain file (/dev/stdout, a pipe) is written to directly. Raises OSError, to be told in the words of whoever writes.
    """
    target = Path(os.path.realpath(path))
    if target.exists() and not target.is_file():
        yield target
        return
    part = target.with_name(f"{target.name}.{os.getpid()}.{threading.get_ident()}.part")
    try:
        yield part
        os.replace(part, target)
    finally:
        part.unlink(missing_ok=True)
