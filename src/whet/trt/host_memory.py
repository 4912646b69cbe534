"""Host memory in the place of CUDA's, for Polygraphy on machines without a GPU."""

from __future__ import annotations

import ctypes
import importlib

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


def connect_polygraphy() -> None:
    """Makes Polygraphy use host memory instead of the CUDA runtime. Raises ImportError without Polygraphy."""
    cuda = importlib.import_module("polygraphy.cuda.cuda")
    vars(cuda)["G_CUDA"] = HostMemory()
