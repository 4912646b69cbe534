"""Thread pools of a user's own build of oneDNN (TBB, Intel's or LLVM's OpenMP): whet's thread count applies to them too.

libgomp stays whet's pool (threads.py). A library with another pool registers it in `threads`; from then on every change of the number of threads,
including the first step of each run, is applied to both pools. Without this, a build for Intel's OpenMP or TBB ran on all CPUs
regardless of `--threads`.
"""

from __future__ import annotations

import ctypes as C
from typing import TYPE_CHECKING, Any, Protocol

from whet.errors import BackendError

if TYPE_CHECKING:
    from whet.backends.cpu.threads import Sequential

_SETTER = C.CFUNCTYPE(None, C.c_int)


class Pool(Protocol):
    """`set(n)` from Python; `address` of a C function void(int) that does the same in a compiled loop."""

    name: str
    address: int
    survives_fork: bool  # the pool starts new threads in a child made by fork()

    def set(self, count: int) -> None: ...


class OpenMP:
    """An OpenMP run-time library other than libgomp: the number of threads is a setting of the calling thread, as in libgomp."""

    def __init__(self, name: str, setter: Any) -> None:
        self.name, self._setter = name, setter
        self.survives_fork = name == "iomp"  # Intel's and LLVM's register a handler of pthread_atfork
        setter.argtypes, setter.restype = [C.c_int], None
        self.address = C.cast(setter, C.c_void_p).value or 0

    def set(self, count: int) -> None:
        self._setter(count)


class _Control(C.Structure):
    """tbb::global_control of oneTBB 2021 and later."""

    _fields_ = [("value", C.c_size_t), ("reserved", C.c_ssize_t), ("parameter", C.c_int), ("spare", C.c_size_t * 4)]


class Tbb:
    """oneTBB's pool: one limit for the whole process (max_allowed_parallelism), replaced when the count changes."""

    name = "tbb"
    survives_fork = False

    def __init__(self, library: C.CDLL) -> None:
        """`library` links oneTBB. Raises BackendError for TBB before 2021, which has another interface."""
        names = ("_ZN3tbb6detail2r16createERNS0_2d114global_controlE", "_ZN3tbb6detail2r17destroyERNS0_2d114global_controlE")
        try:
            self._create, self._destroy = (getattr(library, n) for n in names)
        except AttributeError:
            raise BackendError("oneDNN is linked to a TBB whose thread count cannot be set; use oneTBB 2021 or newer (libtbb.so.12).") from None
        for f in (self._create, self._destroy):
            f.argtypes, f.restype = [C.POINTER(_Control)], None
        self._control: _Control | None = None
        self._callback = _SETTER(self.set)  # interleaved runs with different counts: each run sets its own
        self.address = C.cast(self._callback, C.c_void_p).value or 0

    def set(self, count: int) -> None:
        if self._control is not None and self._control.value == count:
            return
        if self._control is not None:
            self._destroy(C.byref(self._control))
        self._control = _Control(value=count)
        self._create(C.byref(self._control))


def pool_of_library(library: C.CDLL, runtime: str, gomp: C.CDLL | Sequential) -> Pool | None:
    """The pool that a build of oneDNN uses, by its `runtime` (omp, tbb, seq); None if it is libgomp or the build has no pool."""
    if runtime == "tbb":
        return Tbb(library)
    if runtime != "omp":
        return None
    setter = library.omp_set_num_threads  # resolved in the OpenMP library that this library is linked to
    if isinstance(gomp, C.CDLL) and C.cast(setter, C.c_void_p).value == C.cast(gomp.omp_set_num_threads, C.c_void_p).value:
        return None
    return OpenMP("iomp" if hasattr(library, "kmp_set_blocktime") else "other omp", setter)
