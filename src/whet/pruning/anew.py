"""A timing cache that has forgotten what was known: what is asked for is timed again, and takes the old times' place in the cache beneath."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from whet.measure.timing_cache import Timed, TimingCache


class Anew(TimingCache):
    """Knows what was put into it since, and hands that on."""

    def __init__(self, beneath: TimingCache):
        super().__init__("")
        self._beneath = beneath

    def put(self, key: str, timed: Timed, about: dict[str, str]) -> None:
        super().put(key, timed, about)
        self._beneath.put(key, timed, about)

    @contextmanager
    def transaction(self) -> Iterator[None]:
        with self._beneath.transaction():
            yield
