"""The timing cache: measured times in one SQLite file, shared by all builds and safe between processes.

A row's key contains everything that the time depends on (timing_key.py), so rows never become wrong and are never invalidated.
The results of a layer are committed at once: an interrupted build keeps its measurements.
"""

from __future__ import annotations

import contextlib
import json
import sqlite3
import time
from collections.abc import Callable, Iterator
from math import inf
from pathlib import Path
from typing import NamedTuple

from platformdirs import user_cache_dir

from whet.errors import CacheError

VERSION = 1
SYNCHRONOUS = "NORMAL"  # SQLite: a commit waits for the disk
_WAIT_SECONDS = 60.0
_LONGEST_VALUE = 2**24  # bytes


class Timed(NamedTuple):
    """Median and spread in milliseconds, over how many samples."""

    ms: float
    spread_ms: float
    samples: int


def get_default_path() -> Path:
    """The cache that builds use when the user names none."""
    return Path(user_cache_dir("whet")) / f"timings-{VERSION}.sqlite"


#: the tables of a cache. A file with others, or with views or triggers, is refused: reading or writing it would run their queries
_TABLES = {
    "about": "CREATE TABLE about (name TEXT PRIMARY KEY, value TEXT) WITHOUT ROWID",
    "timings": "CREATE TABLE timings (key TEXT PRIMARY KEY, ms REAL, spread_ms REAL, samples INTEGER, about TEXT, made REAL) WITHOUT ROWID",
}


def find_foreign(db: sqlite3.Connection) -> str | None:
    """The first table, view or trigger of a cache that whet did not write, as text; None if there is none. Prepares the connection for files
    from strangers: no functions run from the file, and a value has at most 16 MiB. Raises sqlite3.Error for a damaged file."""
    db.execute("PRAGMA trusted_schema=OFF")
    db.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, _LONGEST_VALUE)
    entries = db.execute("SELECT type, name, sql FROM sqlite_master").fetchall()
    return next((f"the {kind} {name!r}" for kind, name, sql in entries if _TABLES.get(name) != sql), None)


def _decode(text: bytes) -> str:
    """A damaged file may hold bytes that are no UTF-8."""
    return text.decode(errors="replace")


class TimingCache:
    """`get`, `put`; counts hits and misses. With `path` "" nothing outlives this object. With `overwrite` only times put by this object are found,
    so that everything is timed again; they replace those in the file.

    An unusable file raises CacheError. An unusable default file is reported to `note` instead, if given, and not used.
    """

    def __init__(self, path: str | Path | None = None, note: Callable[[str], None] | None = None, *, overwrite: bool = False):
        self.path = get_default_path() if path is None else Path(path) if path else None
        self.hits = self.misses = 0
        self._note = note if path is None else None
        self._overwrite = overwrite
        self._new: dict[str, Timed] = {}
        self.database = self._open() if self.path is not None else None

    def _open(self) -> sqlite3.Connection | None:
        assert self.path is not None
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            db = sqlite3.connect(self.path, timeout=_WAIT_SECONDS, isolation_level=None)
            db.text_factory = _decode
            db.execute(f"PRAGMA synchronous={SYNCHRONOUS}")
            if foreign := find_foreign(db):
                db.close()
                self._give_up(f"it holds {foreign}, which whet does not write")
                return None
            db.execute("BEGIN IMMEDIATE")
            for sql in _TABLES.values():
                db.execute(sql.replace("TABLE", "TABLE IF NOT EXISTS"))
            db.execute("INSERT OR IGNORE INTO about VALUES ('version', ?)", (str(VERSION),))
            found = db.execute("SELECT value FROM about WHERE name = 'version'").fetchone()
            db.execute("COMMIT")
        except (sqlite3.Error, OSError, ValueError) as e:  # ValueError: a path with a zero byte, text that is no UTF-8
            self._give_up(str(e), e)
            return None
        if found is None or found[0] != str(VERSION):
            self._give_up(f"it is of version {found and found[0]}, this whet writes version {VERSION}")
            return None
        return db

    def get(self, key: str) -> Timed | None:
        """The time recorded under this key, by this or another process, or None. Raises CacheError for a damaged file."""
        found = self.peek(key)
        if found is None:
            self.misses += 1
        else:
            self.hits += 1
        return found

    def peek(self, key: str) -> Timed | None:
        """As `get`, but counts nothing."""
        found = self._new.get(key)
        if found is None and self.database is not None and not self._overwrite:
            row = self._run("SELECT ms, spread_ms, samples FROM timings WHERE key = ?", (key,))
            if row:
                ms, spread, samples = row[0]
                if isinstance(ms, float) and isinstance(spread, float) and isinstance(samples, int) and 0 <= ms < inf and 0 <= spread < inf:
                    found = Timed(ms, spread, samples)
        return found

    def put(self, key: str, timed: Timed, about: dict[str, str]) -> None:
        """Stores a time; `about` is a human-readable description (tactic, layer, signature, machine)."""
        self._new[key] = timed
        if self.database is not None:
            row = (key, float(timed.ms), float(timed.spread_ms), int(timed.samples), json.dumps(about), time.time())
            self._run("INSERT OR REPLACE INTO timings VALUES (?, ?, ?, ?, ?, ?)", row)

    def remove(self, key: str) -> None:
        """Removes the time recorded under this key, if there is one."""
        self._new.pop(key, None)
        if self.database is not None:
            self._run("DELETE FROM timings WHERE key = ?", (key,))

    @contextlib.contextmanager
    def transaction(self) -> Iterator[None]:
        """Commits all rows put inside at once: a commit waits for the disk (8 ms), and a layer has tens of times."""
        if self.database is not None:
            self._run("BEGIN IMMEDIATE", ())
        try:
            yield
        finally:
            if self.database is not None and self.database.in_transaction:  # a full disk has ended it already
                self._run("COMMIT", ())

    def _run(self, statement: str, values: tuple) -> list:
        assert self.database is not None
        try:
            return self.database.execute(statement, values).fetchall()
        except (sqlite3.Error, UnicodeError) as e:  # messages quote names of a damaged file
            self.close()
            self._give_up(str(e), e)
            return []

    def _give_up(self, why: str, cause: Exception | None = None) -> None:
        """Raises CacheError for a file named by the user; else notes that nothing is kept."""
        problem = f"the timing cache {self.path} cannot be used: {why}."
        if self._note is None:
            remedy = "Wait for the process that writes it" if "locked" in why else "Delete it"
            raise CacheError(f"{problem} {remedy}, name another with --timingCacheFile, or build with --noBuilderCache.") from cause
        self._note(f"{problem} Times are not kept for the next build; --timingCacheFile names another file.")

    def __len__(self) -> int:
        return int(self._run("SELECT count(*) FROM timings", ())[0][0]) if self.database is not None else len(self._new)

    def close(self) -> None:
        """Closes the file; times put by this object can still be read from it."""
        if self.database is not None:
            with contextlib.suppress(sqlite3.Error):
                self.database.close()
            self.database = None

    def __enter__(self) -> TimingCache:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
