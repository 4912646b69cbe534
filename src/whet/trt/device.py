"""The backend behind the API, and memory at addresses that users give."""

from __future__ import annotations

import ctypes
import os
from math import prod

import numpy as np

from whet.backends import Backend, get_backend
from whet.errors import UsageError
from whet.runtime.memory import make_array_at

BACKENDS = ("cpu", "cuda")
_backend = ""


def use_backend(name: str) -> None:
    """Selects the backend of later builds: "cpu" (addresses are host addresses) or "cuda". Raises UsageError for another name.

    Without a call it is that of the environment variable WHET_TRT_BACKEND, else "cpu". Engines run on the backend that they were built for.
    """
    global _backend
    if name not in BACKENDS:
        raise UsageError(f"whet.trt runs on the backends {', '.join(BACKENDS)}, not on {name!r}")
    _backend = name


def get_backend_name() -> str:
    """The backend of builds."""
    if not _backend:
        use_backend(os.environ.get("WHET_TRT_BACKEND") or "cpu")
    return _backend


def read_array(address: int, shape: tuple[int, ...], dtype: np.dtype, backend: str | None = None) -> np.ndarray:
    """A copy of the array at an address in the backend's memory."""
    device = get_backend(backend or get_backend_name())
    if device.capabilities.host_memory:
        return make_array_at(address, shape, dtype).copy()
    raw = device.read_address(address, prod(shape) * dtype.itemsize)
    return np.frombuffer(raw.tobytes(), dtype).reshape(shape)


def write_array(address: int, array: np.ndarray, backend: Backend) -> None:
    """Copies an array to an address in the backend's memory; returns when the copy is complete."""
    if not backend.capabilities.host_memory:
        backend.write_address(address, array)
    elif array.nbytes:
        ctypes.memmove(address, np.ascontiguousarray(array).ctypes.data, array.nbytes)
