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
_PIECE = 1 << 16  # bytes read at once, if the file's size is not known
LARGEST_MESSAGE = 1_900_000_000  # bytes of weights in an ONNX file; protobuf limits messages to 2 GiB


def read_bounded(path: str | os.PathLike[str], most: int) -> bytes:
    """The contents of a file of at most `most` bytes; also of a pipe or device. Raises OSError for a file that is larger or cannot be read."""
    if "\0" in os.fsdecode(path):
        raise OSError(errno.EINVAL, "its name has a null character", os.fspath(path))
    parts, left = [], most + 1
    with open(path, "rb") as f:
        size = os.fstat(f.fileno()).st_size  # 0 for pipes and devices
        while left and (part := f.read(min(left, max(size + 1, _PIECE)))):  # `read` allocates the requested size before it reads
            parts.append(part)
            left -= len(part)
    if not left:
        raise OSError(errno.EFBIG, f"it has more than {most:,} bytes, the most that is read", os.fspath(path))
    return parts[0] if len(parts) == 1 else b"".join(parts)


def read_json_text(path: str | os.PathLike[str]) -> str:
    """The text of a JSON file. Raises OSError as `read_bounded` does, UnicodeDecodeError for bytes that are no UTF-8."""
    return read_bounded(path, LARGEST_JSON).decode()


def resolve_path(path: str | os.PathLike[str]) -> Path:
    """The absolute path without symbolic links. A loop of links stays as it is (`Path.resolve` raises RuntimeError up to Python 3.12): opening it
    raises OSError."""
    return Path(os.path.realpath(path))


@contextmanager
def replace_atomically(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yields a temporary path in the folder of `path`. It replaces `path` after the block, or is deleted if the block raises.

    Yields `path` itself if it exists and is not a regular file (/dev/stdout, a pipe). Raises OSError; callers add the context.
    """
    target = resolve_path(path)
    if target.exists() and not target.is_file():
        yield target
        return
    part = target.with_name(f"{cut_name(target.name)}.{os.getpid()}.{threading.get_ident()}.part")
    try:
        yield part
        os.replace(part, target)
    finally:
        part.unlink(missing_ok=True)


def cut_name(name: str) -> str:
    """The beginning of a file's name, which leaves room for an ending within the 255 bytes that file systems permit."""
    return os.fsdecode(os.fsencode(name)[:200])


def write_onnx(model: Any, path: Path, save: Callable[..., None], external_above: int = LARGEST_MESSAGE) -> None:
    """Writes an onnx.ModelProto to `path`; `save` is onnx.save. Weights of more than `external_above` bytes go to `<path>.data`.

    Raises OSError; callers add the context.
    """
    if sum(len(t.raw_data) for t in model.graph.initializer) > external_above:
        import tempfile  # only for models of gigabytes

        data = path.name + ".data"
        with tempfile.TemporaryDirectory(prefix=f".{cut_name(path.name)}.", dir=path.parent) as folder:
            save(model, Path(folder) / path.name, save_as_external_data=True, location=data)
            os.replace(Path(folder) / data, path.with_name(data))
            os.replace(Path(folder) / path.name, path)
        return
    with replace_atomically(path) as part:
        part.write_bytes(model.SerializeToString())
