"""Lanes: several lists of launches at once, each on a thread of its own and all of them single-threaded; in between no thread waits.

A batch whose samples do not touch is run so: lane t has its share of the samples, launch after launch, in memory of its own. It is one
parallel region for a whole batch in place of one for every layer.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np

from whet.backends.cpu import loop as loops
from whet.backends.cpu import threads
from whet.backends.cpu.launch import row_of
from whet.backends.cpu.machine_code import address, no_compiler
from whet.errors import BackendError

# The context: GOMP_parallel, omp_get_thread_num, omp_get_num_threads, whet_run, lanes; then for each lane its steps, their count, and what
# whet_run gave. A thread takes every lanes-th lane, as fewer threads may come than were asked for.
_IR = """
define void @whet_lane(i64* %context) {
start:
  %me.p = getelementptr i64, i64* %context, i64 1
  %me.w = load i64, i64* %me.p
  %me.f = inttoptr i64 %me.w to i32 ()*
  %me.i = call i32 %me.f()
  %me = sext i32 %me.i to i64
  %team.p = getelementptr i64, i64* %context, i64 2
  %team.w = load i64, i64* %team.p
  %team.f = inttoptr i64 %team.w to i32 ()*
  %team.i = call i32 %team.f()
  %team = sext i32 %team.i to i64
  %run.p = getelementptr i64, i64* %context, i64 3
  %run.w = load i64, i64* %run.p
  %run = inttoptr i64 %run.w to i64 (i64*, i64)*
  %all.p = getelementptr i64, i64* %context, i64 4
  %all = load i64, i64* %all.p
  br label %more
more:
  %lane = phi i64 [%me, %start], [%next, %work]
  %left = icmp slt i64 %lane, %all
  br i1 %left, label %work, label %end
work:
  %three = mul i64 %lane, 3
  %at = add i64 %three, 5
  %steps.p = getelementptr i64, i64* %context, i64 %at
  %count.p = getelementptr i64, i64* %steps.p, i64 1
  %result.p = getelementptr i64, i64* %steps.p, i64 2
  %steps.w = load i64, i64* %steps.p
  %steps = inttoptr i64 %steps.w to i64*
  %count = load i64, i64* %count.p
  %result = call i64 %run(i64* %steps, i64 %count)
  store i64 %result, i64* %result.p
  %next = add i64 %lane, %team
  br label %more
end:
  ret void
}

define i32 @whet_lanes(i64 %word, i64 %b, i32 %c, i64 %d) {
start:
  %context = inttoptr i64 %word to i64*
  %gomp.w = load i64, i64* %context
  %gomp = inttoptr i64 %gomp.w to void (i64, i64, i32, i32)*
  %lane.w = ptrtoint void (i64*)* @whet_lane to i64
  %all.p = getelementptr i64, i64* %context, i64 4
  %all = load i64, i64* %all.p
  %all.i = trunc i64 %all to i32
  call void %gomp(i64 %lane.w, i64 %word, i32 %all.i, i32 0)
  br label %look
look:
  %lane = phi i64 [0, %start], [%next, %good]
  %left = icmp slt i64 %lane, %all
  br i1 %left, label %ask, label %end
ask:
  %three = mul i64 %lane, 3
  %at = add i64 %three, 7
  %result.p = getelementptr i64, i64* %context, i64 %at
  %result = load i64, i64* %result.p
  %next = add i64 %lane, 1
  %bad = icmp sge i64 %result, 0
  br i1 %bad, label %failed, label %good
good:
  br label %look
failed:
  ret i32 1
end:
  ret i32 0
}
"""
_FIXED, _EACH = 5, 3  # words of the context, and of each lane in it


def why_no_lanes(calls: Sequence[Any]) -> str | None:
    """Why these launches cannot run in lanes; None where they can."""
    if (why := no_compiler()) is not None:
        return why
    if len(threads.setters()) > 1:
        return "oneDNN brings a thread pool of its own, which lanes would have to share"
    outside = next((c for c in calls if c.native is None), None)
    return None if outside is None else f"{_name(outside)} runs in Python, which one thread at a time can"


class Lanes:
    """A recorded launch of all lanes; it returns when the last of them is done. `programs` has the launches of each, which are for one thread.

    Raises BackendError where they cannot run so (`why_no_lanes`).
    """

    def __init__(self, programs: Sequence[Sequence[Any]]):
        if (why := why_no_lanes([c for p in programs for c in p])) is not None:
            raise BackendError(f"samples cannot run in lanes: {why}.")
        one = [(setter, 1, 0, 0, 0, 0) for setter in threads.setters()]  # whoever asks how many threads there are is told one
        self._skipped = len(one)
        self._calls = [list(p) for p in programs]
        self._steps = [np.array([*one, *map(row_of, p)], np.int64) for p in programs]
        words = [threads.address("GOMP_parallel"), threads.address("omp_get_thread_num"), threads.address("omp_get_num_threads")]
        words += [loops.run_address(), len(programs)]
        for steps in self._steps:
            words += [steps.ctypes.data, len(steps), -1]
        self._context = np.array(words, np.int64)
        self.native = (address(_IR, "whet_lanes"), self._context.ctypes.data, 0, 0, 0)

    @property
    def implementation(self) -> str:
        """The kernel that failed last, for the message that says so; else what this is."""
        for calls, failed in zip(self._calls, self._context[_FIXED + 2 :: _EACH], strict=True):
            if failed >= self._skipped:
                return _name(calls[failed - self._skipped])
        return f"{len(self._calls)} lanes"

    def run(self) -> None:
        """Runs them now. Raises BackendError."""
        function = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_int64, ctypes.c_int64, ctypes.c_int32, ctypes.c_int64)(self.native[0])
        if function(*self.native[1:]):
            raise BackendError(f"the kernel {self.implementation} failed at run time.")

    def point(self, kind: str, index: int, address: int) -> None:
        """Its launches are re-pointed one by one."""


def _name(call: Any) -> str:
    return str(getattr(call, "implementation", None) or type(call).__name__)
