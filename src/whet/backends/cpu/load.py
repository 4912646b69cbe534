"""How much of the CPUs others take while something is timed, other processes and other guests of the host: a timing under load says nothing."""

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
    """What others took: `others` is in CPUs (0.5: half a core); None while unknown. /proc counts in ticks of 10 ms.

    `stolen` is the part of it that a hypervisor kept this virtual machine waiting for while it had work: other guests of the same host. What
    they take of a core's caches, memory and, as its other hyperthread, units does not show in it.
    """

    others: float | None = None
    seconds: float = 0.0
    stolen: float = 0.0

    @property
    def who(self) -> str:
        """Who took it, in words."""
        if self.others is None or self.stolen <= 0.1 * self.others:
            return "other processes"
        guests = "other guests of this machine's host"
        return guests if self.stolen >= 0.9 * self.others else f"other processes and {guests}"

    @property
    def disturbed(self) -> bool:
        """Whether others took more than a fifth of one CPU, over long enough to be told from counting noise."""
        return self.others is not None and self.seconds >= 0.1 and self.others > 0.2


def cpu_seconds() -> tuple[float, float] | None:
    """CPU seconds since boot: what all processes have used (user, nice, system, interrupts), and what a hypervisor has kept from this machine
    while it had work (steal, proc_stat(5); 0 on bare metal). None without /proc."""
    try:
        fields = STAT.read_text().split("\n", 1)[0].split()[1:]
    except OSError:
        return None
    user, nice, system, _idle, _wait, irq, soft, steal = (*map(int, fields[:8]), *[0] * (8 - len(fields)))
    tick = os.sysconf("SC_CLK_TCK")
    return (user + nice + system + irq + soft) / tick, steal / tick


def own_seconds() -> float:
    """CPU seconds of this process, all its threads."""
    t = os.times()
    return t.user + t.system


@contextmanager
def watch() -> Iterator[Load]:
    """Measures others' CPU use inside the block; the Load is filled in at its end."""
    load = Load()
    before, own, start = cpu_seconds(), own_seconds(), perf_counter()
    try:
        yield load
    finally:
        load.seconds = perf_counter() - start
        after = cpu_seconds()
        if before is not None and after is not None and load.seconds > 0:
            load.stolen = (after[1] - before[1]) / load.seconds
            load.others = max(0.0, (after[0] - before[0]) - (own_seconds() - own)) / load.seconds + load.stolen
