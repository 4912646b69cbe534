"""The loop that runs native launches: compiled with llvmlite if it is installed, else ctypes call by call.

A step is six int64: function, a, b, c, d, mask. The function is `int32 f(int64, int64, int32, int64)` in the calling conventions of
x86-64 and AArch64. dnnl_primitive_execute(primitive, stream, count, args) and GOMP_parallel(f, context, threads, flags) both match it.
`mask` is -1 if the function returns a status (0 is success) and 0 if it returns nothing.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache

from whet.backends.cpu.machine_code import load_function, why_no_compiler

WORDS = 6

IR = """
define i64 @whet_run(i64* %steps, i64 %count) {
start:
  %any = icmp sgt i64 %count, 0
  br i1 %any, label %step, label %good
step:
  %i = phi i64 [0, %start], [%next, %ok]
  %at = phi i64* [%steps, %start], [%after, %ok]
  %p1 = getelementptr i64, i64* %at, i64 1
  %p2 = getelementptr i64, i64* %at, i64 2
  %p3 = getelementptr i64, i64* %at, i64 3
  %p4 = getelementptr i64, i64* %at, i64 4
  %p5 = getelementptr i64, i64* %at, i64 5
  %after = getelementptr i64, i64* %at, i64 6
  %fn = load i64, i64* %at
  %a = load i64, i64* %p1
  %b = load i64, i64* %p2
  %c = load i64, i64* %p3
  %d = load i64, i64* %p4
  %mask = load i64, i64* %p5
  %f = inttoptr i64 %fn to i32 (i64, i64, i32, i64)*
  %c32 = trunc i64 %c to i32
  %m32 = trunc i64 %mask to i32
  %got = call i32 %f(i64 %a, i64 %b, i32 %c32, i64 %d)
  %status = and i32 %got, %m32
  %bad = icmp ne i32 %status, 0
  br i1 %bad, label %failed, label %ok
ok:
  %next = add i64 %i, 1
  %more = icmp slt i64 %next, %count
  br i1 %more, label %step, label %good
failed:
  ret i64 %i
good:
  ret i64 -1
}
"""

Loop = Callable[[int, int], int]
"""(address of the steps, count) -> index of the step that failed, or -1. The compiled loop releases the GIL."""


def run_address() -> int:
    """Address of the compiled loop, `int64 whet_run(int64* steps, int64 count)`, for other compiled code. Requires `why_no_compiler()` to be None."""
    return load_function(IR, "whet_run")


@cache
def _compile_loop() -> Loop | None:
    """The loop as machine code; None without llvmlite, or on a CPU with another calling convention."""
    return None if why_no_compiler() else ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_void_p, ctypes.c_int64)(run_address())


@cache
def _to_python_function(function: int) -> Callable[[int, int, int, int], int]:
    return ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_int64, ctypes.c_int64, ctypes.c_int32, ctypes.c_int64)(function)


def _run_interpreted(steps: int, count: int) -> int:
    words = (ctypes.c_int64 * (count * WORDS)).from_address(steps)
    for i in range(count):
        fn, a, b, c, d, mask = words[i * WORDS : (i + 1) * WORDS]
        if _to_python_function(fn)(a, b, c, d) & mask:
            return i
    return -1


def get_loop() -> Loop:
    """The fastest loop available in this installation."""
    compiled = _compile_loop()
    return compiled or _run_interpreted


def get_interpreted_loop() -> Loop:
    """The loop without llvmlite: about 0.5 us more per step."""
    return _run_interpreted


def get_loop_kind() -> str:
    """`compiled` or `interpreted`, for describe()."""
    return "compiled" if _compile_loop() else "interpreted"
