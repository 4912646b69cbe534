"""cuDNN's shared library: search path, version, error messages, and a pool of handles."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

from whet.backends.cuda.cudnn.numbers import STATUS
from whet.backends.cuda.driver import per_device
from whet.backends.cuda.libraries import CUBLASLT, NVRTC, find_first_library
from whet.backends.cuda.stream import Stream
from whet.errors import BackendError

_NAMES = ("libcudnn.so.9",)
_OFF = "--tacticSources=-CUDNN builds without it."


class CudnnError(BackendError):
    """A call into the library failed; `status` is its code (3000 to 3999: not supported)."""

    def __init__(self, call: str, status: int, detail: str = "") -> None:
        self.status = status
        words = STATUS.get(status) or STATUS.get(status // 1000 * 1000, "failed")
        super().__init__(f"cuDNN: {call}: {words} (status {status}{', ' + detail if detail else ''}). {_OFF}")


@cache
def load_library() -> Any:
    """The loaded library, or None if it is not installed (`pip install whet[cudnn]`) or its major version is not 9.

    cuBLASLt is loaded first, because cuDNN ends the process if it cannot load it; NVRTC too, for engines compiled at run time.
    """
    if find_first_library(CUBLASLT) is None:
        return None
    find_first_library(NVRTC)
    candidate = find_first_library(_NAMES, ("nvidia.cudnn",))
    if candidate is None:
        return None
    candidate.cudnnGetVersion.restype = ctypes.c_size_t
    candidate.cudnnBackendSetAttribute.argtypes = (ctypes.c_void_p, ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_void_p)
    candidate.cudnnBackendGetAttribute.argtypes = (*candidate.cudnnBackendSetAttribute.argtypes[:4], ctypes.c_void_p, ctypes.c_void_p)
    return candidate if candidate.cudnnGetVersion() // 10000 == 9 else None


def require_library() -> Any:
    """The library. Raises BackendError if there is none."""
    lib = load_library()
    if lib is None:
        raise BackendError(f"libcudnn cannot be loaded: pip install whet[cudnn], or build without it. {_OFF}")
    return lib


def get_version() -> str:
    """The library's version, "" without the library."""
    lib = load_library()
    if lib is None:
        return ""
    number = int(lib.cudnnGetVersion())
    return f"cudnn {number // 10000}.{number // 100 % 100}.{number % 100}"


def check(status: int, call: str) -> None:
    """Raises CudnnError for a status that is not success, with the library's last error message."""
    if status:
        words = ctypes.create_string_buffer(256)
        last = getattr(load_library(), "cudnnGetLastErrorString", None)
        if last is not None:
            last(words, ctypes.c_size_t(len(words)))
        raise CudnnError(call, status, words.value.decode(errors="replace").strip())


class _Pool:
    """Unused handles of one GPU's context. A handle serves one thread at a time, so the pool grows to the peak number of concurrent users."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._free: list[ctypes.c_void_p] = []

    @contextmanager
    def borrow(self) -> Iterator[ctypes.c_void_p]:
        with self._lock:
            handle = self._free.pop() if self._free else None
        if handle is None:
            handle = ctypes.c_void_p()
            check(require_library().cudnnCreate(ctypes.byref(handle)), "cudnnCreate")
        try:
            yield handle
        finally:
            with self._lock:
                self._free.append(handle)


@per_device
def _pool() -> _Pool:
    return _Pool()


@contextmanager
def handle(stream: Stream | None = None) -> Iterator[ctypes.c_void_p]:
    """A handle of the current GPU's context for the duration of the block, on `stream` if one is given."""
    with _pool().borrow() as borrowed:
        if stream is not None:
            check(require_library().cudnnSetStream(borrowed, ctypes.c_void_p(int(stream.handle))), "cudnnSetStream")
        yield borrowed
