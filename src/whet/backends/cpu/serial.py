"""Native calls on one thread inside a run with several: a small layer takes less time than waking the other threads and waiting for them.

oneDNN asks for the calling thread's number of threads when a primitive runs, so the call sets it to one and back. libgomp keeps its pool: it only
rebuilds it for another number of threads above one.
"""

from __future__ import annotations

import numpy as np

from whet.backends.cpu import threads
from whet.backends.cpu.machine_code import load_function, why_no_compiler

# Context words: omp_set_num_threads, the number of threads to restore, and the call's function and four arguments.
_IR = """
define i32 @whet_serial(i64 %word, i64 %unused1, i32 %unused2, i64 %unused3) {
start:
  %context = inttoptr i64 %word to i64*
  %set.w = load i64, i64* %context
  %set = inttoptr i64 %set.w to void (i32)*
  %team.p = getelementptr i64, i64* %context, i64 1
  %team = load i64, i64* %team.p
  %team.i = trunc i64 %team to i32
  %fn.p = getelementptr i64, i64* %context, i64 2
  %a.p = getelementptr i64, i64* %context, i64 3
  %b.p = getelementptr i64, i64* %context, i64 4
  %c.p = getelementptr i64, i64* %context, i64 5
  %d.p = getelementptr i64, i64* %context, i64 6
  %fn.w = load i64, i64* %fn.p
  %a = load i64, i64* %a.p
  %b = load i64, i64* %b.p
  %c = load i64, i64* %c.p
  %d = load i64, i64* %d.p
  %c.i = trunc i64 %c to i32
  %fn = inttoptr i64 %fn.w to i32 (i64, i64, i32, i64)*
  call void %set(i32 1)
  %status = call i32 %fn(i64 %a, i64 %b, i32 %c.i, i64 %d)
  call void %set(i32 %team.i)
  ret i32 %status
}
"""


def why_not_serial() -> str | None:
    """Reason why single calls of a run cannot have another number of threads than the run; None if they can."""
    if len(threads.list_setters()) > 1:
        return "oneDNN has its own thread pool, which is set for a whole run"
    return why_no_compiler()


class SerialCall:
    """`native`: the native call `step` (function and four arguments) on one thread; afterwards the calling thread has `team` threads again."""

    def __init__(self, step: tuple[int, int, int, int, int], team: int) -> None:
        words = [threads.get_gomp_address("omp_set_num_threads"), team, *(w - (1 << 64) if w >= 1 << 63 else w for w in step)]
        self._context = np.array(words, np.int64)
        self.native = (load_function(_IR, "whet_serial"), self._context.ctypes.data, 0, 0, 0)
