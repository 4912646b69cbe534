"""Host memory in the place of CUDA's, for Polygraphy and cuda-python on machines without a GPU."""

from __future__ import annotations

import ctypes
import importlib
from typing import Any

import numpy as np


class HostMemory:
    """The functions of `polygraphy.cuda.Cuda` on host memory: device addresses are host addresses, streams do nothing."""

    def __init__(self) -> None:
        self._buffers: dict[int, np.ndarray] = {}

    def create_stream(self) -> int:
        """A stream handle."""
        return 1

    def stream_synchronize(self, ptr: int) -> None:
        """Returns at once: copies and runs are synchronous."""

    def destroy_stream(self, ptr: int) -> None:
        """Does nothing."""

    def malloc(self, nbytes: int) -> int:
        """The address of `nbytes` bytes, at least 1."""
        buffer = np.empty(max(nbytes, 1), np.uint8)
        self._buffers[buffer.ctypes.data] = buffer
        return buffer.ctypes.data

    def free(self, ptr: int | None) -> None:
        """Frees memory of `malloc`."""
        self._buffers.pop(ptr or 0, None)

    def memcpy(self, dst: int, src: int, nbytes: int, kind: object, stream_ptr: int | None = None) -> None:
        """Copies `nbytes` bytes."""
        if nbytes:
            ctypes.memmove(dst, src, nbytes)


class HostRuntime:
    """Functions of cuda-python's `cuda.bindings.runtime` on host memory: they return (cudaSuccess, result). Streams are synchronous."""

    def __init__(self, bindings: Any) -> None:
        self._memory = HostMemory()
        self._success = bindings.cudaError_t.cudaSuccess
        self._stream_type = bindings.cudaStream_t
        allocate, free, copy, fill, nothing = self._allocate, self._free, self._copy, self._fill, self._succeed
        self.functions: dict[str, Any] = {
            "cudaMalloc": allocate, "cudaMallocAsync": allocate, "cudaMallocHost": allocate, "cudaMallocManaged": allocate,
            "cudaHostAlloc": allocate, "cudaFree": free, "cudaFreeAsync": free, "cudaFreeHost": free, "cudaMemcpy": copy,
            "cudaMemcpyAsync": copy, "cudaMemset": fill, "cudaMemsetAsync": fill, "cudaStreamCreate": self._create_stream,
            "cudaStreamCreateWithFlags": self._create_stream, "cudaStreamCreateWithPriority": self._create_stream, "cudaStreamDestroy": nothing,
            "cudaStreamSynchronize": nothing, "cudaDeviceSynchronize": nothing, "cudaSetDevice": nothing,
            "cudaGetDevice": lambda: (self._success, 0), "cudaGetDeviceCount": lambda: (self._success, 1),
        }  # fmt: skip

    def _allocate(self, size: int, *_: object) -> tuple[Any, int]:
        return self._success, self._memory.malloc(size)

    def _free(self, ptr: Any, *_: object) -> tuple[Any]:
        self._memory.free(_get_address(ptr))
        return (self._success,)

    def _copy(self, dst: Any, src: Any, count: int, kind: object, *_: object) -> tuple[Any]:
        self._memory.memcpy(_get_address(dst), _get_address(src), count, kind)
        return (self._success,)

    def _fill(self, ptr: Any, value: int, count: int, *_: object) -> tuple[Any]:
        ctypes.memset(_get_address(ptr), value, count)
        return (self._success,)

    def _create_stream(self, *_: object) -> tuple[Any, Any]:
        return self._success, self._stream_type(self._memory.create_stream())

    def _succeed(self, *_: object) -> tuple[Any]:
        return (self._success,)


def _get_address(memory: Any) -> int:
    """The address of memory as cuda-python takes it: an integer, a ctypes pointer, an array, or an object with a buffer."""
    if isinstance(memory, ctypes.c_void_p):
        return memory.value or 0
    try:
        return int(memory)
    except (TypeError, ValueError):  # an array is not an integer
        return np.frombuffer(memory, np.uint8).ctypes.data


def connect_cuda_python() -> None:
    """Makes cuda-python's memory and stream functions use host memory. Raises ImportError without the package cuda-bindings.

    Other functions of `cuda.bindings.runtime`, and all of `driver` and `nvrtc`, stay CUDA's and need a GPU.
    """
    bindings = importlib.import_module("cuda.bindings.runtime")
    vars(bindings).update(HostRuntime(bindings).functions)


def connect_polygraphy() -> None:
    """Makes Polygraphy use host memory instead of the CUDA runtime. Raises ImportError without Polygraphy."""
    cuda = importlib.import_module("polygraphy.cuda.cuda")
    vars(cuda)["G_CUDA"] = HostMemory()
