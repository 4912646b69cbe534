"""Work of the host while a GPU runs: the reference judges one layer on a core of its own while the next layer runs."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

T = TypeVar("T")
_MOST = 8  # threads; each holds the arrays of what it works on


class Beside:
    """Runs functions on threads of its own, or at once where there is nothing to run beside. A context manager: leaving it waits for all.

    NumPy lets go of Python's lock in all that takes long, so threads do for the reference.
    """

    def __init__(self, many: bool):
        workers = min(_MOST, len(os.sched_getaffinity(0))) if many else 1
        self._pool = ThreadPoolExecutor(workers, thread_name_prefix="beside") if workers > 1 else None
        self._most = 2 * workers  # results that wait
        self._waiting: deque[tuple[Future[Any], Callable[[Any], None]]] = deque()

    def early(self, make: Callable[[], T]) -> Callable[[], T]:
        """What gives the result of `make`: begun now on a thread, or, where there are none, when it is asked for."""
        return make if self._pool is None else self._pool.submit(make).result

    def then(self, make: Callable[[], T], take: Callable[[T], None]) -> None:
        """`take(make())` later: `make` on a thread, `take` on this one, in the order in which they were given."""
        if self._pool is None:
            take(make())
            return
        self._waiting.append((self._pool.submit(make), take))
        while len(self._waiting) > self._most:
            self._take()

    def settle(self) -> None:
        """Returns when everything that was given to `then` is taken."""
        while self._waiting:
            self._take()

    def _take(self) -> None:
        result, take = self._waiting.popleft()
        take(result.result())

    def __enter__(self) -> Beside:
        return self

    def __exit__(self, *_: object) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
