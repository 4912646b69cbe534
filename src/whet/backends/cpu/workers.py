"""Several launch lists in parallel: each worker is one thread that runs its own list of single-threaded kernels, without synchronization.

Batches of independent samples run this way (sample-parallel): worker t processes its part of the samples in its own memory. A batch then has one
parallel region instead of one per layer.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np

from whet.backends._base import Call
from whet.backends.cpu import loop as loops
from whet.backends.cpu import threads
from whet.backends.cpu.launch import call_row, name_of
from whet.backends.cpu.machine_code import load_function, why_no_compiler
from whet.errors import BackendError

# Context words: GOMP_parallel, omp_get_thread_num, omp_get_num_threads, whet_run, number of workers; then for each worker the address of its
# steps, their count, and the result of whet_run. Thread i runs the lists i, i + team size, ...: the team may be smaller than requested.
IR = """
define void @whet_worker(i64* %context) {
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
  %worker = phi i64 [%me, %start], [%next, %work]
  %left = icmp slt i64 %worker, %all
  br i1 %left, label %work, label %end
work:
  %three = mul i64 %worker, 3
  %at = add i64 %three, 5
  %steps.p = getelementptr i64, i64* %context, i64 %at
  %count.p = getelementptr i64, i64* %steps.p, i64 1
  %result.p = getelementptr i64, i64* %steps.p, i64 2
  %steps.w = load i64, i64* %steps.p
  %steps = inttoptr i64 %steps.w to i64*
  %count = load i64, i64* %count.p
  %result = call i64 %run(i64* %steps, i64 %count)
  store i64 %result, i64* %result.p
  %next = add i64 %worker, %team
  br label %more
end:
  ret void
}

define i32 @whet_parallel_launch(i64 %word, i64 %b, i32 %c, i64 %d) {
start:
  %context = inttoptr i64 %word to i64*
  %gomp.w = load i64, i64* %context
  %gomp = inttoptr i64 %gomp.w to void (i64, i64, i32, i32)*
  %worker.w = ptrtoint void (i64*)* @whet_worker to i64
  %all.p = getelementptr i64, i64* %context, i64 4
  %all = load i64, i64* %all.p
  %all.i = trunc i64 %all to i32
  call void %gomp(i64 %worker.w, i64 %word, i32 %all.i, i32 0)
  br label %look
look:
  %worker = phi i64 [0, %start], [%next, %good]
  %left = icmp slt i64 %worker, %all
  br i1 %left, label %ask, label %end
ask:
  %three = mul i64 %worker, 3
  %at = add i64 %three, 7
  %result.p = getelementptr i64, i64* %context, i64 %at
  %result = load i64, i64* %result.p
  %next = add i64 %worker, 1
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
_FIXED, _EACH = 5, 3  # words of the context's header, and of each worker


def why_not_parallel(calls: Sequence[Call]) -> str | None:
    """Reason why these launches cannot run on workers; None if they can."""
    if (why := why_no_compiler()) is not None:
        return why
    if len(threads.list_setters()) > 1:
        return "oneDNN has its own thread pool, which the workers would share"
    python = next((c for c in calls if c.native is None), None)
    return None if python is None else f"{name_of(python)} runs in Python, one thread at a time (GIL)"


class ParallelLaunch(Call):
    """One launch that runs `launch_lists` in parallel, one single-threaded worker each, and returns when the last is done.

    Raises BackendError if `why_not_parallel` gives a reason.
    """

    def __init__(self, launch_lists: Sequence[Sequence[Call]]):
        if (why := why_not_parallel([call for calls in launch_lists for call in calls])) is not None:
            raise BackendError(f"samples cannot run in parallel: {why}.")
        prologue = [(setter, 1, 0, 0, 0, 0) for setter in threads.list_setters()]  # one thread for kernels that ask omp_get_max_threads
        self._skipped = len(prologue)
        self._calls = [list(calls) for calls in launch_lists]
        self._steps = [np.array([*prologue, *map(call_row, calls)], np.int64) for calls in launch_lists]
        words = [
            threads.get_gomp_address("GOMP_parallel"),
            threads.get_gomp_address("omp_get_thread_num"),
            threads.get_gomp_address("omp_get_num_threads"),
        ]
        words += [loops.run_address(), len(launch_lists)]
        for steps in self._steps:
            words += [steps.ctypes.data, len(steps), -1]
        self._context = np.array(words, np.int64)
        self.native = (load_function(IR, "whet_parallel_launch"), self._context.ctypes.data, 0, 0, 0)

    @property
    def implementation(self) -> str:  # type: ignore[override]  # a plain attribute of Call, computed here
        """Name of the kernel that failed in the last run; otherwise the number of workers."""
        for calls, failed in zip(self._calls, self._context[_FIXED + 2 :: _EACH], strict=True):
            if failed >= self._skipped:
                return name_of(calls[failed - self._skipped])
        return f"{len(self._calls)} workers"

    def run(self) -> None:
        """Runs all lists now. Raises BackendError when a kernel fails."""
        assert self.native is not None
        function = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_int64, ctypes.c_int64, ctypes.c_int32, ctypes.c_int64)(self.native[0])
        if function(*self.native[1:]):
            raise BackendError(f"the kernel {self.implementation} failed at run time.")

    def set_address(self, kind: str, index: int, address: int) -> None:
        """Does nothing: the inner launches get new addresses one by one."""
