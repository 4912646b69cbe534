"""Writing a file whole or not at all: readers never see half of one, and a full disk costs nothing that was there."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

LARGEST_MESSAGE = 1_900_000_000  # bytes of weights in an ONNX file; protobuf refuses a message of 2 GiB


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


def write_onnx(model: Any, path: Path, save: Callable[..., None], external_above: int = LARGEST_MESSAGE) -> None:
    """Writes an onnx.ModelProto to `path`, with `save` (onnx.save) and its weights in `<path>.data` where they are more bytes than `external_above`.

    Raises OSError, to be told in the words of whoever writes.
    """
    if sum(len(t.raw_data) for t in model.graph.initializer) > external_above:
        data = path.with_name(path.name + ".data")
        data.unlink(missing_ok=True)  # onnx appends to a file that is there
        save(model, path, save_as_external_data=True, location=data.name)
        return
    with replacing(path) as part:
        part.write_bytes(model.SerializeToString())
