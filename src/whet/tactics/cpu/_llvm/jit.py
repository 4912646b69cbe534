"""Kernels of our own on the CPU: how their LLVM IR begins, and how they are launched.

backends/cpu/machine_code.py compiles it; where that cannot, tactics that need them refuse.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from functools import cache

from whet.backends import Call
from whet.backends.cpu import threads
from whet.backends.cpu.info import cpuinfo
from whet.backends.cpu.machine_code import address as address
from whet.backends.cpu.machine_code import no_compiler
from whet.tactics.cpu._llvm.work_stealing import context_of, dealt, team_ir


def available() -> str | None:
    """Why nothing can be compiled here; None where it can."""
    return no_compiler()


@cache
def version() -> str:
    """The compiler's version, for timing keys; "" without one."""
    if available():
        return ""
    import llvmlite.binding as llvm

    return "LLVM " + ".".join(map(str, llvm.llvm_version_info))


@cache
def has(feature: str) -> bool:
    """Whether the CPU has an instruction set, by Linux's name."""
    return feature in (cpuinfo().get("flags") or cpuinfo().get("Features") or "").split()


def opening(name: str, words: Sequence[str], whole: str) -> str:
    """IR of `void name(i64* context)`, which deals `whole` items to its thread bit by bit (_dealing.py), and of the beginning of what it calls
    for each bit, up to the kernel's own work.

    `words` name what the context holds, in order, `share` (items of a thread's run) among them; behind it every word is a value, and `%from` and
    `%end` are the items to be worked on.
    """
    return f"{dealt(name, words, whole)}{part(name, words)}"


def part(name: str, words: Sequence[str]) -> str:
    """IR of the beginning of `void name.part(i64* context, i64 from, i64 end)`, which works on some items, as in `opening`."""
    loads = "\n".join(f"  %{n}.p = getelementptr i64, i64* %context, i64 {k}\n  %{n} = load i64, i64* %{n}.p" for k, n in enumerate(words))
    return f"""
define internal void @{name}.part(i64* %context, i64 %from, i64 %end) noinline {{
start:
{loads}"""


@cache
def _team() -> int:
    """Address of the function that starts a dealt kernel on the threads of the pool."""
    return address(team_ir(threads.address("GOMP_parallel")), "team")


class ParallelCall(Call):
    """A recorded launch of `void function(int64* context)` on `count` threads of the pool, or on the calling one.

    `context` holds addresses and sizes; `operands` says which operand of the layer lies at which of its places, for re-pointing. With one thread
    the function is called as it is; else threads take its items bit by bit, in multiples of `step`. `shifts` says how many bytes into an
    operand a place points.
    """

    returns_status = False

    def __init__(
        self, function: int, context: list[int], operands: Mapping[int, tuple[str, int]], count: int, implementation: str,
        shifts: dict[int, int] | None = None, step: int = 1,
    ) -> None:  # fmt: skip
        self._context, self._shifts = context_of(context, count, step, threads.address("omp_get_thread_num")), shifts or {}
        self._operands, self.implementation = operands, implementation
        place = self._context.ctypes.data
        if count == 1:
            self.native: tuple[int, int, int, int, int] | None = (function, place, 0, 0, 0)
        else:
            self.native = (_team(), function, place, count, 0)

    def run(self) -> None:
        assert self.native is not None
        f, a, b, c, d = self.native
        _PROTOTYPE(f)(a, b, c, d)

    def point(self, kind: str, index: int, address: int) -> None:
        for place, operand in self._operands.items():  # one operand can have several: an image that is added to its own convolution
            if operand == (kind, index):
                self._context[place] = address + self._shifts.get(place, 0)


_PROTOTYPE = ctypes.CFUNCTYPE(None, ctypes.c_int64, ctypes.c_int64, ctypes.c_int32, ctypes.c_int64)
