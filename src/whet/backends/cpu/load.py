"""External CPU load: the CPU time that other processes and other virtual machines of the host use meanwhile. Times taken under load are not kept."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter

from whet.backends._base import Load


def read_cpu_seconds() -> tuple[float, float] | None:
    """CPU seconds since boot that all processes have used (user, nice, system, interrupts), and steal time (0 on bare metal).

    None if the system does not report them.
    """
    import psutil

    try:
        times = psutil.cpu_times()
    except (OSError, psutil.Error):
        return None
    used = sum(getattr(times, name, 0.0) for name in ("user", "nice", "system", "irq", "softirq"))
    return used, getattr(times, "steal", 0.0)


def process_seconds() -> float:
    """CPU seconds of this process, all threads together."""
    t = os.times()
    return t.user + t.system


@contextmanager
def watch() -> Iterator[Load]:
    """Measures the CPU time that others use inside the block; the Load is complete at its end."""
    load = Load()
    before, own, start = read_cpu_seconds(), process_seconds(), perf_counter()
    try:
        yield load
    finally:
        load.seconds = perf_counter() - start
        after = read_cpu_seconds()
        if before is not None and after is not None and load.seconds > 0:
            load.stolen = (after[1] - before[1]) / load.seconds
            load.others = max(0.0, (after[0] - before[0]) - (process_seconds() - own)) / load.seconds + load.stolen
