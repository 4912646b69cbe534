"""Launch lists: recorded calls that run repeatedly. Consecutive native calls run in one compiled loop, Python calls between them."""

from __future__ import annotations

from time import perf_counter

import numpy as np

from whet.backends._base import Call, Executable
from whet.backends.cpu import loop as loops
from whet.backends.cpu import threads
from whet.errors import BackendError


class LaunchList:
    """A recording stream: `Kernel.enqueue` of tactics adds Calls to it.

    A Call sets `returns_status = False` if its native function returns nothing (GOMP_parallel); otherwise 0 means success.
    """

    def __init__(self, threads: int):
        self.threads = threads
        self.calls: list = []

    def record(self, call) -> None:
        self.calls.append(call)

    def finish(self, loop: loops.Loop | None = None) -> LaunchExecutable:
        """The recorded calls, ready to run. Later address changes of a call take effect, as native words are addresses of argument blocks."""
        return LaunchExecutable(self.calls, self.threads, loop or loops.get_loop())

    @staticmethod
    def loop_kind() -> str:
        return loops.get_loop_kind()


class _Native:
    """Consecutive native calls: six words each (see loop.py)."""

    def __init__(self, calls: list, rows: list[tuple[int, ...]], loop: loops.Loop):
        self.calls, self.loop = calls, loop
        self.words = np.array(rows, dtype=np.int64).reshape(-1, loops.WORDS)
        self.address, self.count = self.words.ctypes.data, len(rows)

    def run(self) -> None:
        failed = self.loop(self.address, self.count)
        if failed >= 0:
            call = self.calls[failed]
            if not isinstance(call, str) and call.failure:
                raise BackendError(call.failure)
            name = name_of(call)
            raise BackendError(
                f"the kernel {name} failed at run time. Build the engine again on this machine: verification bans such kernels."
            )


class LaunchExecutable(Executable):
    """Calls in order. `run()` executes all of them and returns when the results are complete. Not thread-safe."""

    needs_refresh = False  # the calls' argument blocks are used in place

    def __init__(self, calls: list, thread_count: int, loop: loops.Loop):
        self.calls = list(calls)
        self._loop = loop
        # The number of threads is a setting of the calling thread, which may differ between runs, so each run sets it first.
        self._set_threads: list[tuple[int, ...]] = [(setter, thread_count, 0, 0, 0, 0) for setter in threads.list_setters()]
        self._segments: list = []
        self._single: list = []
        rows: list[tuple[int, ...]] = list(self._set_threads)
        members: list = ["omp_set_num_threads"] * len(rows)
        for call in self.calls:
            if call.native is None:
                self._close(members, rows)
                rows, members = [], []
                self._segments.append(call)
            else:
                rows.append(call_row(call))
                members.append(call)
        self._close(members, rows)
        if len(self._segments) == 1:
            self.run = self._segments[0].run  # type: ignore[method-assign]  # saves a call and a loop per run of a small network

    def _close(self, members: list, rows: list) -> None:
        if rows:
            self._segments.append(_Native(members, rows, self._loop))

    def run(self) -> None:
        for segment in self._segments:
            segment.run()

    def run_timed(self) -> list[float]:
        """Runs call by call and returns the seconds of each, in recording order."""
        if not self._single:
            self._single = [c if c.native is None else _Native([c], [call_row(c)], self._loop) for c in self.calls]
        _Native(["omp_set_num_threads"] * len(self._set_threads), self._set_threads, self._loop).run()
        times = []
        for step in self._single:
            start = perf_counter()
            step.run()
            times.append(perf_counter() - start)
        return times


def name_of(call: Call | str) -> str:
    """The kernel's name, for messages."""
    return call if isinstance(call, str) else call.implementation or type(call).__name__


def call_row(call: Call) -> tuple[int, ...]:
    """A native call's words and the mask for its status, as signed 64-bit numbers."""
    assert call.native is not None, "a Python launch has no words"
    mask = -1 if call.returns_status else 0
    return (*(w - (1 << 64) if w >= 1 << 63 else w for w in call.native), mask)
