"""cuDNN's shared library: where it is looked for, its version, its words for failures, and a pool of its handles."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

from whet.backends.cuda.cudnn.numbers import STATUS
from whet.backends.cuda.driver import per_device
from whet.backends.cuda.libraries import CUBLASLT, NVRTC, first_library
from whet.backends.cuda.stream import Stream
from whet.errors import BackendError

_NAMES = ("libcudnn.so.9",)
_OFF = "--tacticSources=-CUDNN builds without it."


class CudnnError(BackendError):
    """A call into the library failed; `status` is its number (3000 to 3999: what was asked for is not supported)."""

    def __init__(self, what: str, status: int, detail: str = "") -> None:
        self.status = status
        words = STATUS.get(status) or STATUS.get(status // 1000 * 1000, "failed")
        super().__init__(f"cuDNN: {what}: {words} (status {status}{', ' + detail if detail else ''}). {_OFF}")


@cache
def library() -> Any:
    """The loaded library, or None where it is not installed (`pip install whet[cudnn]`) or has another major version than 9.

    It ends the process where it cannot load cuBLASLt, so that is loaded before it; and NVRTC, which engines compiled at run time need.
    """
    if first_library(CUBLASLT) is None:
        return None
    first_library(NVRTC)
    found = first_library(_NAMES, ("nvidia.cudnn",))
    if found is None:
        return None
    found.cudnnGetVersion.restype = ctypes.c_size_t
    found.cudnnBackendSetAttribute.argtypes = (ctypes.c_void_p, ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_void_p)
    found.cudnnBackendGetAttribute.argtypes = (*found.cudnnBackendSetAttribute.argtypes[:4], ctypes.c_void_p, ctypes.c_void_p)
    return found if found.cudnnGetVersion() // 10000 == 9 else None


def loaded() -> Any:
    """The library; BackendError where there is none."""
    lib = library()
    if lib is None:
        raise BackendError(f"libcudnn cannot be loaded: pip install whet[cudnn], or build without it. {_OFF}")
    return lib


def version() -> str:
    """The library's version as it tells it, "" where there is none."""
    lib = library()
    if lib is None:
        return ""
    number = int(lib.cudnnGetVersion())
    return f"cudnn {number // 10000}.{number // 100 % 100}.{number % 100}"


def check(status: int, what: str) -> None:
    """Raises CudnnError for a status that is not success, with the library's last words on it."""
    if status:
        words = ctypes.create_string_buffer(256)
        last = getattr(library(), "cudnnGetLastErrorString", None)
        if last is not None:
            last(words, ctypes.c_size_t(len(words)))
        raise CudnnError(what, status, words.value.decode(errors="replace").strip())


class _Pool:
    """Handles of one GPU's context that no stream uses now. A handle serves one thread at a time, so there are as many as were ever busy at once."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._free: list[ctypes.c_void_p] = []

    @contextmanager
    def taken(self) -> Iterator[ctypes.c_void_p]:
        with self._lock:
            handle = self._free.pop() if self._free else None
        if handle is None:
            handle = ctypes.c_void_p()
            check(loaded().cudnnCreate(ctypes.byref(handle)), "cudnnCreate")
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
    """A handle of the current GPU's context for as long as the block lasts, on `stream` where one is given."""
    with _pool().taken() as taken:
        if stream is not None:
            check(loaded().cudnnSetStream(taken, ctypes.c_void_p(int(stream.handle))), "cudnnSetStream")
        yield taken
