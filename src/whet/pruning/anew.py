"""A timing cache view that ignores existing entries: everything is timed again, and new times replace those in the underlying cache."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from whet.measure.timing_cache import Timed, TimingCache


class RemeasuringCache(TimingCache):
    """Returns only entries put since its creation, and forwards them to the underlying cache."""

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
