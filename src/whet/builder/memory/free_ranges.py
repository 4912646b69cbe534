"""Free byte ranges below a growing end: best fit, as in an allocator."""

from __future__ import annotations

from bisect import bisect_left, insort


class FreeRanges:
    """Free ranges between taken ones, neighboring ones merged; everything from `end` on is free too."""

    def __init__(self) -> None:
        self.end = 0
        self._ranges: list[tuple[int, int]] = []  # (bytes, offset), sorted
        self._bytes: dict[int, int] = {}  # of the free range that starts at an offset
        self._starts: dict[int, int] = {}  # of the free range that stops at an offset

    def take(self, nbytes: int) -> int:
        """Takes `nbytes` bytes from the smallest free range that holds them (the lowest of equal ones), else at the end; returns the offset."""
        i = bisect_left(self._ranges, (nbytes, -1))
        if not nbytes:
            return 0
        if i == len(self._ranges):
            at = self.end
            self.end += nbytes
            return at
        size, at = self._ranges[i]
        self._remove(at)
        if size > nbytes:
            self._insert(at + nbytes, size - nbytes)
        return at

    def release(self, at: int, nbytes: int) -> None:
        """Frees a taken range of at least one byte."""
        if at + nbytes in self._bytes:
            nbytes += self._remove(at + nbytes)
        if at in self._starts:
            before = self._starts[at]
            nbytes += self._remove(before)
            at = before
        if at + nbytes == self.end:
            self.end = at
        else:
            self._insert(at, nbytes)

    def _insert(self, at: int, nbytes: int) -> None:
        insort(self._ranges, (nbytes, at))
        self._bytes[at], self._starts[at + nbytes] = nbytes, at

    def _remove(self, at: int) -> int:
        """Removes the free range that starts at `at`; returns its bytes."""
        nbytes = self._bytes.pop(at)
        del self._starts[at + nbytes]
        del self._ranges[bisect_left(self._ranges, (nbytes, at))]
        return nbytes
