"""Host work overlapped with the GPU: the reference checks one layer on a CPU thread while the next layer runs."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from contextvars import copy_context
from typing import Any, TypeVar

from whet.backends.cpu.threads import count_affinity_cpus
from whet.builder.verify.blas_threads import limit_blas_threads

T = TypeVar("T")
_MOST = 8  # threads; each holds the arrays of its layer


class OverlappedWork:
    """Runs functions on its own threads, or immediately if nothing overlaps with them. A context manager: exit waits for all.

    NumPy releases the GIL in long operations, so threads suffice for the reference. Its products use one thread each meanwhile: several calls of
    a library with a pool of its own wait for each other. Functions run in a copy of the caller's context (its `products_by`).
    """

    def __init__(self, many: bool):
        workers = min(_MOST, count_affinity_cpus()) if many else 1
        self._pool = ThreadPoolExecutor(workers, thread_name_prefix="beside") if workers > 1 else None
        self._most = 2 * workers  # pending results
        self._single = ExitStack()
        self._waiting: deque[tuple[Future[Any], Callable[[Any], None]]] = deque()

    def early(self, make: Callable[[], T]) -> Callable[[], T]:
        """A function that returns the result of `make`, which starts now on a thread, or at the first call if there are no threads."""
        return make if self._pool is None else self._pool.submit(copy_context().run, make).result

    def schedule(self, make: Callable[[], T], take: Callable[[T], None]) -> None:
        """`take(make())` later: `make` on a thread, `take` on this one, in the order in which they were given."""
        if self._pool is None:
            take(make())
            return
        self._waiting.append((self._pool.submit(copy_context().run, make), take))
        while len(self._waiting) > self._most:
            self._take()

    def settle(self) -> None:
        """Waits until all results have been delivered."""
        while self._waiting:
            self._take()

    def _take(self) -> None:
        result, take = self._waiting.popleft()
        take(result.result())

    def __enter__(self) -> OverlappedWork:
        if self._pool is not None:
            self._single.enter_context(limit_blas_threads(1))
        return self

    def __exit__(self, *_: object) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
        self._single.close()
