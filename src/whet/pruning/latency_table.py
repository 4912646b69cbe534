"""The latency table: layer latencies by shape, measured with the engine's tactics, stored in a file that can be extended and shared.

One JSON file. A row is one layer at static shapes on one device under one set of tactics, precisions and cache conditions. Its key is a
digest of all of these, so rows of several machines or versions share a file without being confused. Weight values are not part of the key:
a fine-tuned or differently cut model reuses the rows of its shapes.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from dataclasses import asdict, dataclass, replace
from math import inf
from pathlib import Path
from typing import Any

from whet.errors import CacheError
from whet.files import read_json_text, replace_atomically

FORMAT, VERSION = "whet.pruning.latency_table", 2  # version 1 lacks `others`; it is still read


@dataclass(frozen=True)
class Row:
    """Median and spread in milliseconds of the best tactic for a layer (`layer` is its text without names or weights).

    `others` is the external load during timing, in CPUs (other processes, steal time); 0 if negligible or unknown.
    """

    device: str
    precisions: str
    conditions: str
    layer: str
    tactic: str
    ms: float
    spread_ms: float
    others: float = 0.0


def compute_row_key(device: str, tactics: str, precisions: str, conditions: str, layer: str) -> str:
    """SHA-256 over everything the latency depends on; `tactics` is a digest of all tactics' sources and library versions."""
    return hashlib.sha256(json.dumps([device, tactics, precisions, conditions, layer]).encode()).hexdigest()


class LatencyTable:
    """Rows by key. With a path, existing rows are read, and new rows are written every few seconds and on `save`."""

    def __init__(self, path: str | os.PathLike | None = None, *, save_interval_s: float = 2.0):
        self.save_interval_s = save_interval_s
        self.path = Path(path) if path is not None else None
        self.rows: dict[str, Row] = {} if self.path is None or _is_missing(self.path) else _read(self.path)
        self._stored = dict(self.rows)  # as last read from the file or written to it
        self.added = 0
        self._unsaved = 0
        self._saved = time.monotonic()

    def get(self, key: str) -> Row | None:
        """The row of this key, or None."""
        return self.rows.get(key)

    def put(self, key: str, row: Row) -> None:
        """Adds a row; saves the file if the last save was more than `save_interval_s` seconds ago."""
        self.rows[key] = row
        self.added += 1
        self._unsaved += 1
        if self.path is not None and time.monotonic() - self._saved > self.save_interval_s:
            self.save()

    def mark(self, key: str, others: float) -> None:
        """Records the external load (in CPUs) during the timing of this row."""
        self.rows[key] = replace(self.rows[key], others=others)
        self._unsaved += 1

    @property
    def busy(self) -> int:
        """Number of rows timed under external load."""
        return sum(r.others > 0 for r in self.rows.values())

    def take(self, path: str | os.PathLike) -> int:
        """Copies the rows of another table that this one lacks, or has only under external load; returns their number. Raises CacheError."""
        others = {k: r for k, r in _read(Path(path)).items() if _is_quieter(r, self.rows.get(k))}
        self.rows |= others
        self._unsaved += len(others)
        return len(others)

    def save(self) -> None:
        """Writes the file atomically, merged with rows that other processes have added meanwhile. Raises CacheError."""
        if self.path is None or (not self._unsaved and self.path.exists()):
            return
        if self.path.exists():
            changed = {k: r for k, r in _read(self.path).items() if r != self._stored.get(k)}  # by other processes
            self.rows |= {k: r for k, r in changed.items() if _is_quieter(r, self.rows.get(k))}
        data = {"format": FORMAT, "version": VERSION, "rows": {k: asdict(r) for k, r in sorted(self.rows.items())}}
        try:
            with replace_atomically(self.path) as part:
                part.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
        except OSError as e:
            raise CacheError(f"cannot write the latency table {self.path}: {e.strerror}. Check that the folder exists and can be written.") from e
        self._stored, self._unsaved, self._saved = dict(self.rows), 0, time.monotonic()


def _is_missing(path: Path) -> bool:
    """True for a path at which a new file can be written; a path that cannot be used is found before the first measurement."""
    try:
        path.lstat()
    except FileNotFoundError:
        return True
    except (OSError, ValueError):
        return False
    return False


def _is_quieter(row: Row, ours: Row | None) -> bool:
    """True if we lack the row, or ours was timed under external load and the other table's was not."""
    return ours is None or bool(ours.others and not row.others)


def _read(path: Path) -> dict[str, Row]:
    try:
        data: Any = json.loads(read_json_text(path))
    except OSError as e:
        raise CacheError(f"cannot read the latency table {path}: {e.strerror}. Check the path.") from e
    except (ValueError, RecursionError) as e:
        raise CacheError(f"the latency table {path} is not valid JSON ({e}): delete it, or give another path") from e
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise CacheError(f"{path} is not a latency table: its 'format' is not {FORMAT!r}. Give another path.")
    if data.get("version") not in (1, VERSION):
        raise CacheError(f"the latency table {path} has version {data.get('version')!r}, this whet writes version {VERSION}: give another path")
    try:
        rows = {str(k): Row(**r) for k, r in data["rows"].items()}
    except (KeyError, TypeError, AttributeError) as e:
        raise CacheError(f"the latency table {path} has a damaged row ({e}): delete it, or give another path") from e
    if not all(isinstance(t, str) for r in rows.values() for t in (r.device, r.precisions, r.conditions, r.layer, r.tactic)):
        raise CacheError(f"the latency table {path} has a damaged row (a text field is not a string): delete it, or give another path")
    if not all(isinstance(t, int | float) and 0 <= t < inf for r in rows.values() for t in (r.ms, r.spread_ms, r.others)):
        raise CacheError(f"the latency table {path} holds a time that is not a finite number >= 0: delete it, or give another path")
    return rows
