"""Whole engines in turns: one that is clearly behind leaves, and the turns end when there is nobody left to compare with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median

_BEHIND = (1.5, 1.2, 1.1, 1.06)  # after each turn: whose fastest run takes this much longer than the leader's typical one leaves; the last stays
_SEEN = 0.02  # seconds that one has run before it may leave: an interruption takes a few milliseconds, all of a short engine's first run
FEWEST = 3  # turns, however long a run takes


def race(runs: Sequence[Callable[[], float]], seconds: float, most: int) -> list[list[float]]:
    """Seconds of each of `runs`, which take turns, forwards and backwards: `most` turns, or as many as fit into `seconds` for each of them,
    at least FEWEST. One that is clearly behind leaves, with the times that it has, as they would be at the others' end: a machine changes
    its pace (clocks, guests of the same host), and who left in its fastest moment would pass all who went on.

    Each has run before; one more run of each does not count: it says how many turns there is time for.
    """
    once = sum(run() for run in runs)
    turns = max(FEWEST, min(most, int(seconds * len(runs) / max(once, 1e-6))))
    times: list[list[float]] = [[] for _ in runs]
    racing, left = list(range(len(runs))), dict[int, float]()  # who left, and the leader's time then
    for k in range(turns):
        for i in racing if k % 2 == 0 else reversed(racing):
            times[i].append(runs[i]())
        lead = min(median(times[i]) for i in racing)
        behind = _BEHIND[min(k, len(_BEHIND) - 1)] * lead
        left |= {i: lead for i in racing if min(times[i]) > behind and sum(times[i]) >= _SEEN}
        racing = [i for i in racing if i not in left]
    end = min((median(times[i]) for i in racing), default=0.0)
    return [[s * end / left[i] for s in t] if i in left else t for i, t in enumerate(times)]
