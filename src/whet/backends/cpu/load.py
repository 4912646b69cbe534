"""How much of the CPUs other processes take while something is timed: a timing under load says nothing."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

STAT = Path("/proc/stat")


@dataclass
class Load:
    """What others took: `others` is in CPUs (0.5: half a core); None while unknown. /proc counts in ticks of 10 ms."""

    others: float | None = None
    seconds: float = 0.0

    @property
    def disturbed(self) -> bool:
        """Whether others took more than a fifth of one CPU, over long enough to be told from counting noise."""
        return self.others is not None and self.seconds >= 0.1 and self.others > 0.2


def busy_seconds() -> float | None:
    """CPU seconds that all processes have used since boot (user, nice, system, interrupts); None without /proc."""
    try:
        fields = STAT.read_text().split("\n", 1)[0].split()[1:]
    except OSError:
        return None
    user, nice, system, _idle, _wait, irq, soft = (int(v) for v in fields[:7])
    return (user + nice + system + irq + soft) / os.sysconf("SC_CLK_TCK")


def own_seconds() -> float:
    """CPU seconds of this process, all its threads."""
    t = os.times()
    return t.user + t.system


@contextmanager
def watch() -> Iterator[Load]:
    """Measures others' CPU use inside the block; the Load is filled in at its end."""
    load = Load()
    before, own, start = busy_seconds(), own_seconds(), perf_counter()
    try:
        yield load
    finally:
        load.seconds = perf_counter() - start
        after = busy_seconds()
        if before is not None and after is not None and load.seconds > 0:
            load.others = max(0.0, (after - before) - (own_seconds() - own)) / load.seconds
