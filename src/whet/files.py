"""Atomic file writes: readers never see a partial file, and a full disk does not destroy an existing one."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

LARGEST_JSON = 2**28  # bytes of a lock, a pruning recipe, a table: real ones have kilobytes to megabytes
LARGEST_MESSAGE = 1_900_000_000  # bytes of weights in an ONNX file; protobuf limits messages to 2 GiB


def read_bounded(path: str | os.PathLike[str], most: int) -> bytes:
    """The contents of a file of at most `most` bytes; also of a pipe or device. Raises OSError for a file that is larger or cannot be read."""
    with open(path, "rb") as f:
        data = f.read(most + 1)
    if len(data) > most:
        raise OSError(errno.EFBIG, f"it has more than {most:,} bytes, the most that is read", os.fspath(path))
    return data


def read_json_text(path: str | os.PathLike[str]) -> str:
    """The text of a JSON file. Raises OSError as `read_bounded` does, UnicodeDecodeError for bytes that are no UTF-8."""
    return read_bounded(path, LARGEST_JSON).decode()


@contextmanager
def replace_atomically(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yields a temporary path in the folder of `path`. It replaces `path` after the block, or is deleted if the block raises.

    Yields `path` itself if it exists and is not a regular file (/dev/stdout, a pipe). Raises OSError; callers add the context.
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


def write_onnx(model: Any, path: Path, save: Callable[..., None], external_above: int = LARGEST_MESSAGE) -> None:
    """Writes an onnx.ModelProto to `path`; `save` is onnx.save. Weights of more than `external_above` bytes go to `<path>.data`.

    Raises OSError; callers add the context.
    """
    if sum(len(t.raw_data) for t in model.graph.initializer) > external_above:
        data = path.with_name(path.name + ".data")
        data.unlink(missing_ok=True)  # onnx appends to an existing file
        save(model, path, save_as_external_data=True, location=data.name)
        return
    with replace_atomically(path) as part:
        part.write_bytes(model.SerializeToString())
