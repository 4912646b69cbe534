"""Launches of JIT-compiled CPU kernels, and the availability of the compiler.

backends/cpu/machine_code.py compiles the kernels. Without a compiler their tactics refuse.
"""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Callable, Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any

from whet.backends import Call
from whet.backends.cpu import info, threads
from whet.backends.cpu.machine_code import Generated as Generated
from whet.backends.cpu.machine_code import get_compiler_version, why_no_compiler
from whet.backends.cpu.machine_code import load_function as load_function
from whet.tactics.cpu._llvm.work_stealing import emit_team_ir, make_context


def why_unavailable() -> str | None:
    """The reason why this process cannot compile, or None."""
    return why_no_compiler()


@cache
def get_version() -> str:
    """The compiler's version, for timing keys; "" without one."""
    return "" if why_unavailable() else get_compiler_version()


@cache
def has(feature: str) -> bool:
    """True if kernels may use an instruction set of this CPU, by Linux's name (/proc/cpuinfo)."""
    return feature in info.list_cpu_flags()


def generate_lazily(make: Callable[..., str], *arguments: Any) -> str | Generated:
    """The IR `make(*arguments)` for `address`, which generates it only if its object is not kept: a large module takes 50 ms. `make` is a function of
    whet's CPU kernels, and its arguments have a `repr` that says all."""
    sources = _compute_sources_digest()
    return Generated(make, arguments, sources) if sources else make(*arguments)


@cache
def _compute_sources_digest() -> str:
    """Digest of the source of all CPU kernels; "" if it is not in files."""
    digest, files = hashlib.sha256(), sorted(Path(__file__).parents[1].rglob("*.py"))
    for path in files:
        digest.update(path.read_bytes())
    return digest.hexdigest() if files else ""


@cache
def _get_team_address() -> int:
    """Address of the function that starts a kernel on the threads of the pool."""
    return load_function(emit_team_ir(), "team")


class ParallelCall(Call):
    """A recorded launch of `void function(int64* context)` on `count` threads of the pool, or on the calling one.

    `context` holds addresses and sizes. `operands` maps the index of an address word to the layer's operand, for re-pointing, and `shifts` to a byte
    offset from that operand. Several threads share the function's items in multiples of `step`.
    """

    returns_status = False

    def __init__(
        self, function: int, context: list[int], operands: Mapping[int, tuple[str, int]], count: int, implementation: str,
        shifts: dict[int, int] | None = None, step: int = 1,
    ) -> None:  # fmt: skip
        self._context, self._shifts = make_context(context, count, step, threads.get_gomp_address("omp_get_thread_num")), shifts or {}
        self._operands, self.implementation = operands, implementation
        address = self._context.ctypes.data
        if count == 1:
            self.native: tuple[int, int, int, int, int] | None = (function, address, 0, 0, 0)
        else:
            self.native = (_get_team_address(), function, address, count, threads.get_gomp_address("GOMP_parallel"))

    def run(self) -> None:
        assert self.native is not None
        f, a, b, c, d = self.native
        _PROTOTYPE(f)(a, b, c, d)

    def set_address(self, kind: str, index: int, address: int) -> None:
        for word, operand in self._operands.items():  # an operand may have several words: an image that is added to its own convolution
            if operand == (kind, index):
                self._context[word] = address + self._shifts.get(word, 0)

    def make_address_setter(self, kind: str, index: int) -> Callable[[int], None]:
        """`set_address` for one operand as a function."""
        words = [word for word, operand in self._operands.items() if operand == (kind, index)]
        if len(words) == 1 and not self._shifts.get(words[0]):
            return _make_writer(self._context.data, words[0])
        return partial(self.set_address, kind, index)


def _make_writer(words: memoryview, index: int) -> Callable[[int], None]:
    def write(value: int) -> None:
        words[index] = value  # through a memoryview: faster than through an array

    return write


_PROTOTYPE = ctypes.CFUNCTYPE(None, ctypes.c_int64, ctypes.c_int64, ctypes.c_int32, ctypes.c_int64)
