"""The input shapes that an engine runs at, counted on request: `whet retune --from-trace` tunes for the frequent ones.

    engine = whet.load("model.engine", record_shapes="shapes.json")      # or WHET_RECORD_SHAPES=shapes.json for an unchanged program
    ... engine.run(...) ...
    engine.close()                                                       # adds the counts to the file (or at the end of the process)
"""

from __future__ import annotations

import atexit
import fcntl
import json
import os
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from whet.errors import EngineError
from whet.files import read_bounded
from whet.forks import make_lock

Shapes = dict[str, tuple[int, ...]]
_LARGEST = 1 << 24  # bytes of a file
_MOST = 10_000  # different shapes in a file


class ShapeTrace:
    """Counts of shapes, added to the file `path` by `save`, at the latest at the end of the process."""

    def __init__(self, path: str | os.PathLike):
        self.path = Path(path)
        self._counts: dict[tuple[tuple[str, tuple[int, ...]], ...], int] = {}
        self._lock = make_lock()
        self._owner = os.getpid()
        saved = weakref.WeakMethod(self.save)
        atexit.register(lambda: (save := saved()) is not None and save())

    def record(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Counts one run at these shapes."""
        key = tuple(shapes.items())
        with self._lock:
            if self._owner != os.getpid():  # a child of fork() leaves the parent's runs to the parent
                self._owner, self._counts = os.getpid(), {}
            if key in self._counts or len(self._counts) < _MOST:
                self._counts[key] = self._counts.get(key, 0) + 1

    def save(self) -> None:
        """Adds the counts since the last `save` to the file, which other processes may extend at the same time. Raises EngineError."""
        with self._lock:
            counts, self._counts = self._counts, {}
        if not counts or self._owner != os.getpid():
            return
        try:
            with open(self.path.with_name(f".{self.path.name}.lock"), "w", encoding="utf-8") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                total = {tuple(shapes.items()): runs for shapes, runs in read_trace(self.path)} if self.path.exists() else {}
                for key, n in counts.items():
                    total[key] = total.get(key, 0) + n
                _write(self.path, total)
        except OSError as e:
            raise EngineError(f"cannot write the shapes to {self.path}: {e.strerror}; choose another file") from e


def read_trace(path: str | os.PathLike) -> list[tuple[Shapes, int]]:
    """The shapes in a file with the number of their runs, most frequent first. Raises EngineError for a file that holds something else."""
    try:
        data = json.loads(read_bounded(path, _LARGEST))
        rows = [({str(n): tuple(map(_require_size, s)) for n, s in row["shapes"].items()}, _require_size(row["runs"])) for row in data["runs"]]
    except OSError as e:
        raise EngineError(f"cannot read {path}: {e.strerror}. Record shapes with whet.load(engine, record_shapes='{path}').") from e
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as e:
        raise EngineError(f"{path} is no record of shapes (whet.load(engine, record_shapes='{path}') makes one): {type(e).__name__} {e}") from e
    return sorted(rows, key=lambda row: -row[1])


def _require_size(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 1 << 40:
        raise ValueError(f"{value!r} is no size")
    return value


def _write(path: Path, total: Mapping[Any, int]) -> None:
    rows = [{"shapes": dict(key), "runs": n} for key, n in sorted(total.items(), key=lambda item: -item[1])]
    import tempfile  # its imports take 6 ms, and most processes record no shapes

    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    with os.fdopen(handle, "w", encoding="utf-8") as out:
        json.dump({"runs": rows[:_MOST]}, out, indent=1)
    os.replace(name, path)
