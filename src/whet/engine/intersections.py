"""Pairs of tensors that share bytes while both are live: intersecting rectangles of bytes and steps, without testing every pair."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from heapq import heappop, heappush
from typing import NamedTuple


class Rectangle(NamedTuple):
    """The bytes from `at` to `end` (excluded), live from step `first` to step `last` (included)."""

    name: str
    at: int
    end: int
    first: int
    last: int


def list_intersections(rectangles: Sequence[Rectangle]) -> Iterator[tuple[Rectangle, Rectangle]]:
    """Each pair with common bytes and steps at least once; a pair may come several times.

    Takes n (log n)^2 steps plus a logarithmic factor of the pairs. The range of steps is halved recursively. In each part, the rectangles that
    are live in all of it are compared with the others by a sweep over the bytes; the others go on to the halves.
    """
    ordered = sorted(r for r in rectangles if r.end > r.at)
    ordered.sort(key=lambda r: r.at)
    if not ordered:
        return
    waiting = [(min(r.first for r in ordered), max(r.last for r in ordered), ordered)]
    while waiting:
        low, high, part = waiting.pop()
        if len(part) < 2:
            continue
        yield from _sweep(part, low, high)
        partial = [r for r in part if r.first > low or r.last < high]
        middle = (low + high) // 2
        if low < high:
            waiting.append((middle + 1, high, [r for r in partial if r.last > middle]))
            waiting.append((low, middle, [r for r in partial if r.first <= middle]))


def _sweep(part: Sequence[Rectangle], low: int, high: int) -> Iterator[tuple[Rectangle, Rectangle]]:
    """Pairs with common bytes of which one is live at all steps from `low` to `high`; `part` is sorted by the first byte."""
    whole: list[tuple[int, int]] = []  # heaps of (end, index): the rectangles with bytes at the current position
    partial: list[tuple[int, int]] = []
    for i, r in enumerate(part):
        for heap in (whole, partial):
            while heap and heap[0][0] <= r.at:
                heappop(heap)
        is_whole = r.first <= low and r.last >= high
        for _, k in (*whole, *partial) if is_whole else whole:
            yield part[k], r
        heappush(whole if is_whole else partial, (r.end, i))
