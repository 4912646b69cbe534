"""Independent computations on several threads: NumPy and the compiled kernels release Python's lock while they compute."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

MOST_WORKERS = 8  # each has the activations of a sample in memory, and prepares kernels of its own under Python's lock
_T = TypeVar("_T")
_R = TypeVar("_R")


def count_workers() -> int:
    """Threads for this process: one per CPU that it may use, at most MOST_WORKERS."""
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(cpus, MOST_WORKERS))


def map_concurrently(compute: Callable[[_T], _R], items: Iterable[_T], workers: int) -> Iterator[_R]:
    """compute(item) of each item in order, on `workers` threads (1: the calling one). At most `workers` items are taken ahead of the results that
    were read, so that samples are loaded when they are needed. Raises the first error in the order of the items."""
    if workers <= 1:
        yield from map(compute, items)
        return
    with ThreadPoolExecutor(workers, thread_name_prefix="precision") as pool:
        waiting: deque[Future[_R]] = deque()
        try:
            for item in items:
                waiting.append(pool.submit(compute, item))
                if len(waiting) >= workers:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()
