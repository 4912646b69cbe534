"""Cache state before a kernel is timed: memory is read by all threads, or evicted from all caches line by line.

Reading more memory than the caches hold takes longer than most kernels: 5.4 ms for 54 MiB on a Cascade Lake, while clflushopt evicts 8 MiB from
the caches of all cores in 0.2 ms. Reads by one thread do not change the second-level caches of the other cores.
"""

from __future__ import annotations

from functools import cache

import numpy as np

from whet.backends.cpu import threads
from whet.backends.cpu.info import list_cpu_flags
from whet.backends.cpu.machine_code import load_function, why_no_compiler

LINE = 64  # bytes of a cache line
_SHARED = 1 << 14  # bytes: below this size waking the threads costs more than it saves

# Context words: omp_get_thread_num, address, total number of lines, lines per thread.
_IR = """
declare void @llvm.x86.clflushopt(i8*)
declare void @llvm.x86.sse2.mfence()

define void @<NAME>(i64* %context) {
start:
  %seen = alloca i64
  %me.w = load i64, i64* %context
  %me.f = inttoptr i64 %me.w to i32 ()*
  %me.i = call i32 %me.f()
  %me = sext i32 %me.i to i64
  %at.p = getelementptr i64, i64* %context, i64 1
  %at = load i64, i64* %at.p
  %lines.p = getelementptr i64, i64* %context, i64 2
  %lines = load i64, i64* %lines.p
  %share.p = getelementptr i64, i64* %context, i64 3
  %share = load i64, i64* %share.p
  %from = mul i64 %me, %share
  %upto = add i64 %from, %share
  %late = icmp sgt i64 %upto, %lines
  %end = select i1 %late, i64 %lines, i64 %upto
  br label %look
look:
  %k = phi i64 [ %from, %start ], [ %k1, %work ]
  %sum = phi i64 [ 0, %start ], [ %sum1, %work ]
  %more = icmp slt i64 %k, %end
  br i1 %more, label %work, label %done
work:
  %shift = shl i64 %k, 6
  %where = add i64 %at, %shift
  <WORK>
  %k1 = add i64 %k, 1
  br label %look
done:
  <DONE>
  store volatile i64 %sum, i64* %seen
  ret void
}
"""
_READ = """%p = inttoptr i64 %where to i64*
  %v = load i64, i64* %p
  %sum1 = add i64 %sum, %v"""
_EVICT = """%p = inttoptr i64 %where to i8*
  call void @llvm.x86.clflushopt(i8* %p)
  %sum1 = add i64 %sum, 0"""
_FENCE = "call void @llvm.x86.sse2.mfence()"


def read(array: np.ndarray, count: int) -> None:
    """Reads a word of every cache line of a contiguous array with `count` threads, one contiguous chunk each, so that their caches hold it. The
    calling thread reads all of it if no compiler is installed."""
    if why_no_compiler() is not None:
        array.view(np.uint8).reshape(-1)[::LINE].max(initial=0)
    else:
        _run("read", array.ctypes.data, array.nbytes, count)


def can_evict() -> bool:
    """True if this CPU has clflushopt (x86 since 2015) and a compiler for the code that uses it is installed."""
    return why_no_compiler() is None and "clflushopt" in list_cpu_flags()


def evict(at: int, nbytes: int, count: int) -> None:
    """Evicts memory of this process from the caches of all cores with `count` threads; its contents are unchanged. Requires `can_evict`."""
    _run("evict", at, nbytes, count)


@cache
def _compile_function(name: str) -> int:
    work, done = (_READ, "") if name == "read" else (_EVICT, _FENCE)
    text = _IR.replace("<NAME>", name).replace("<WORK>", work).replace("<DONE>", done)
    return load_function(text if name == "evict" else text[text.index("define") :], name)  # the declarations are x86 intrinsics


def _run(name: str, at: int, nbytes: int, count: int) -> None:
    """Runs the function on all cache lines of the bytes."""
    first = at // LINE * LINE
    lines, count = -(-(at + nbytes - first) // LINE), count if nbytes >= _SHARED else 1
    context = np.array([threads.get_gomp_address("omp_get_thread_num"), first, lines, -(-lines // count)], np.int64)
    threads.run_parallel(_compile_function(name), context.ctypes.data, count)
