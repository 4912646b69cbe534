"""Device and pinned host memory as plain buffers: an address, a size, copies to and from NumPy."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

from whet.backends.cuda.driver import check_status, get_current_device, load_driver, release
from whet.errors import BackendError


class DeviceBuffer:
    """`nbytes` of GPU memory (256-byte aligned by the driver); freed by close() or with the object."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = int(nbytes)
        self.address = 0
        self._device = get_current_device()
        try:
            self.address = int(check_status(load_driver().cuMemAlloc(max(self.nbytes, 1))))
        except BackendError as error:
            free, total = check_status(load_driver().cuMemGetInfo())
            raise BackendError(
                f"{self.nbytes / 2**20:.1f} MiB of GPU memory were requested, {free / 2**20:.0f} of {total / 2**20:.0f} are free. {error}"
            ) from error

    @classmethod
    def of(cls, array: np.ndarray) -> DeviceBuffer:
        """A buffer that holds a copy of `array`."""
        buffer = cls(array.nbytes)
        buffer.write(array)
        return buffer

    def write(self, array: np.ndarray, offset: int = 0) -> None:
        """Copies the bytes of `array` (C order) to `offset`; returns when done."""
        source = np.ascontiguousarray(array)
        self._check(offset, source.nbytes)
        if source.nbytes:
            check_status(load_driver().cuMemcpyHtoD(self.address + offset, source.ctypes.data, source.nbytes))
            check_status(
                load_driver().cuStreamSynchronize(0)
            )  # small copies may return before they are complete, and other streams do not wait for them

    def read(self, shape: tuple[int, ...], dtype: Any, offset: int = 0) -> np.ndarray:
        """A NumPy copy of the bytes from `offset` on; waits for all work on the context's default stream."""
        out = np.empty(shape, dtype)
        self._check(offset, out.nbytes)
        if out.nbytes:
            check_status(load_driver().cuMemcpyDtoH(out.ctypes.data, self.address + offset, out.nbytes))
        return out

    def copy(self, source: DeviceBuffer, to: int, at: int, nbytes: int) -> None:
        """Copies `nbytes` from `at` in `source` to `to` here; returns when done."""
        self._check(to, nbytes)
        source._check(at, nbytes)
        if nbytes:
            check_status(load_driver().cuMemcpyDtoD(self.address + to, source.address + at, nbytes))
            check_status(load_driver().cuStreamSynchronize(0))

    def fill(self, byte: int = 0) -> None:
        """Sets every byte; returns when done."""
        check_status(load_driver().cuMemsetD8(self.address, byte, self.nbytes))
        check_status(load_driver().cuStreamSynchronize(0))

    def start_fill(self, stream: Any, byte: int = 0) -> None:
        """Enqueues a memset on the stream."""
        check_status(load_driver().cuMemsetD8Async(self.address, byte, self.nbytes, stream.handle))

    def start_write(self, source: PinnedBuffer, stream: Any, offset: int = 0) -> None:
        """Enqueues a copy of all of `source` to `offset` on the stream."""
        self._check(offset, source.nbytes)
        check_status(load_driver().cuMemcpyHtoDAsync(self.address + offset, source.address, source.nbytes, stream.handle))

    def start_read(self, target: PinnedBuffer, stream: Any, offset: int = 0) -> None:
        """Enqueues a copy from `offset` that fills `target` on the stream."""
        self._check(offset, target.nbytes)
        check_status(load_driver().cuMemcpyDtoHAsync(target.address, self.address + offset, target.nbytes, stream.handle))

    def _check(self, offset: int, nbytes: int) -> None:
        if offset < 0 or offset + nbytes > self.nbytes:
            raise BackendError(
                f"A copy of {nbytes} bytes at {offset} does not fit a buffer of {self.nbytes}. This is a mistake in whet: please report it."
            )

    def close(self) -> None:
        """Frees the memory now."""
        address, self.address = self.address, 0
        if address:
            release(self._device, load_driver().cuMemFree, address)

    def __del__(self) -> None:
        if self.address:
            self.close()


class PinnedBuffer:
    """Page-locked host memory, with a NumPy byte array in `.array`; asynchronous copies require it."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = int(nbytes)
        self._device = get_current_device()
        self.address = int(check_status(load_driver().cuMemHostAlloc(max(self.nbytes, 1), 0)))
        self.array = np.frombuffer(memoryview((ctypes.c_char * self.nbytes).from_address(self.address)), np.uint8)

    def close(self) -> None:
        """Frees the memory; `.array` must not be used afterwards."""
        address, self.address = self.address, 0
        if address:
            release(self._device, load_driver().cuMemFreeHost, address)

    def __del__(self) -> None:
        if self.address:
            self.close()
