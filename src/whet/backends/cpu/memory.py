"""Host memory for arenas and weights: aligned, zeroed, with all pages touched; refused rather than overcommitted."""

from __future__ import annotations

import ctypes
import mmap
from math import prod

import numpy as np

from whet.backends._base import Buffer
from whet.backends.cpu.info import get_available_memory
from whet.errors import BackendError

_MAPPED = 1 << 20  # from this size on each buffer has its own mapping, so that freed memory returns to the system
_HUGE = 1 << 21  # bytes of a huge page on x86-64, and on AArch64 with pages of 4 KiB


def make_array_at(address: int, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """The array of `shape` at a host address; the caller keeps the memory alive."""
    nbytes = prod(shape) * dtype.itemsize
    if nbytes == 0:
        return np.empty(shape, dtype)
    return np.frombuffer(memoryview((ctypes.c_uint8 * nbytes).from_address(address)), dtype).reshape(shape)


def allocate(nbytes: int, alignment: int = 64) -> Buffer:
    """`nbytes` of zeroed memory at a multiple of `alignment` (a power of two, at most 4096).

    Raises BackendError if the machine has less available: Linux would overcommit and kill the process later.
    """
    if nbytes < 0 or alignment < 1 or alignment & (alignment - 1) or alignment > mmap.PAGESIZE:
        raise BackendError(
            f"cannot allocate {nbytes} bytes aligned to {alignment}: sizes are not negative, alignments powers of two to 4096"
        )
    available = get_available_memory() if nbytes >= _MAPPED else nbytes  # 0.5 ms; an engine has many small weights
    if nbytes > available:
        raise BackendError(
            f"{nbytes / 2**20:.1f} MiB are needed in one block, but {available / 2**20:.1f} MiB are available. Lower the profile's largest shapes or "
            "the batch, end other processes, or cap the engine with --memPoolSize."
        )
    try:
        if nbytes >= _MAPPED:
            # private: shared memory (mmap's default) gets no huge pages, and a forked child would write into its parent's memory
            mapped = mmap.mmap(-1, nbytes + _HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            if hasattr(mmap, "MADV_HUGEPAGE"):
                _advise(mapped)
            whole = np.frombuffer(mapped, np.uint8)
            start = -whole.ctypes.data % _HUGE  # first huge-page boundary; untouched pages take no memory
            array = whole[start : start + nbytes]
            array[:: mmap.PAGESIZE] = 0  # fault the pages in now, not in the first inference
            owner: object = mapped
        else:
            owner = np.zeros(nbytes + alignment, np.uint8)
            start = -owner.ctypes.data % alignment
            array = owner[start : start + nbytes]
    except (MemoryError, OSError, OverflowError, ValueError) as e:
        raise BackendError(f"{nbytes / 2**20:.1f} MiB cannot be allocated: {e}. Lower the profile's largest shapes or the batch.") from e
    return Buffer(array.ctypes.data, nbytes, array, owner)


def _advise(mapped: mmap.mmap) -> None:
    """Requests huge pages; operating systems without them return an error, which is ignored, or have no such request."""
    try:
        mapped.madvise(mmap.MADV_HUGEPAGE)
    except (AttributeError, OSError):
        return
