"""ITimingCache: measured times of tactics as bytes."""

from __future__ import annotations

import sqlite3
from typing import Any

from whet.errors import CacheError
from whet.measure.timing_cache import find_foreign
from whet.trt.handle import Handle

_COLUMNS = "key, ms, spread_ms, samples, about, made"


class ITimingCache(Handle):
    """Measurements of tactics, in memory: the bytes of whet's cache file (SQLite)."""

    def __init__(self, data: Any = b""):
        self.data = bytes(data)

    def serialize(self) -> memoryview:
        """The cache as bytes."""
        return memoryview(self.data)

    def reset(self) -> bool:
        """Forgets all measurements."""
        self.data = b""
        return True

    def combine(self, input_cache: ITimingCache, ignore_mismatch: bool) -> bool:
        """Adds the measurements of another cache; its own stay. False for damaged data.

        Keys contain the machine, so caches of different machines combine.
        """
        if not input_cache.data:
            return True
        if not self.data:
            self.data = input_cache.data
            return True
        try:
            with sqlite3.connect(":memory:") as ours, sqlite3.connect(":memory:") as theirs:
                ours.deserialize(self.data)
                theirs.deserialize(input_cache.data)
                if find_foreign(ours) or find_foreign(theirs):
                    return False
                rows = theirs.execute(f"SELECT {_COLUMNS} FROM timings").fetchall()
                ours.executemany(f"INSERT OR IGNORE INTO timings ({_COLUMNS}) VALUES (?, ?, ?, ?, ?, ?)", rows)
                ours.commit()
                self.data = ours.serialize()
        except sqlite3.Error:
            return False
        return True

    def queryKeys(self) -> list[str]:
        """The keys of all measurements. Raises CacheError for damaged data."""
        if not self.data:
            return []
        try:
            with sqlite3.connect(":memory:") as db:
                db.deserialize(self.data)
                if foreign := find_foreign(db):
                    raise CacheError(f"the timing cache holds {foreign}, which whet does not write: create another with create_timing_cache(b'')")
                return [key for (key,) in db.execute("SELECT key FROM timings ORDER BY key")]
        except sqlite3.Error as e:
            raise CacheError(f"the timing cache is damaged: {e}. Create another with create_timing_cache(b'').") from e
