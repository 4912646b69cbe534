"""Host memory for arenas and weights: aligned, zeroed, its pages touched, refused rather than overcommitted."""

from __future__ import annotations

import mmap

import numpy as np

from whet.backends._base import Buffer
from whet.backends.cpu.info import available_memory
from whet.errors import BackendError

_MAPPED = 1 << 20  # from this size on memory is mapped by itself, so that it goes back to the system when freed
_HUGE = 1 << 21  # bytes of a huge page on x86-64, and on AArch64 with pages of 4 KiB


def allocate(nbytes: int, alignment: int = 64) -> Buffer:
    """`nbytes` of zeroed memory at a multiple of `alignment` (a power of two, at most 4096).

    Raises BackendError when that is more than the machine has left: Linux would promise it and kill the process later.
    """
    if nbytes < 0 or alignment < 1 or alignment & (alignment - 1) or alignment > mmap.PAGESIZE:
        raise BackendError(
            f"cannot allocate {nbytes} bytes aligned to {alignment}: sizes are not negative, alignments powers of two to 4096"
        )
    room = available_memory()
    if room is not None and nbytes > room:
        raise BackendError(
            f"{nbytes / 2**20:.1f} MiB are needed in one piece, but {room / 2**20:.1f} MiB are free. Lower the profile's largest shapes or "
            "the batch, end other processes, or cap the engine with --memPoolSize."
        )
    try:
        if nbytes >= _MAPPED:
            # private: shared memory, mmap's default, gets no huge pages, and a forked child would write into its parent's
            mapped = mmap.mmap(-1, nbytes + _HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            if hasattr(mmap, "MADV_HUGEPAGE"):
                _advise(mapped)
            whole = np.frombuffer(mapped, np.uint8)
            start = -whole.ctypes.data % _HUGE  # where huge pages begin; what is never touched takes no memory
            array = whole[start : start + nbytes]
            array[:: mmap.PAGESIZE] = 0  # touch the pages now: the first inference would pay for it otherwise
            owner: object = mapped
        else:
            owner = np.zeros(nbytes + alignment, np.uint8)
            start = -owner.ctypes.data % alignment
            array = owner[start : start + nbytes]
    except (MemoryError, OSError, OverflowError, ValueError) as e:
        raise BackendError(f"{nbytes / 2**20:.1f} MiB cannot be allocated: {e}. Lower the profile's largest shapes or the batch.") from e
    return Buffer(array.ctypes.data, nbytes, array, owner)


def _advise(mapped: mmap.mmap) -> None:
    """Asks for huge pages; a kernel without them says no, and small pages do."""
    try:
        mapped.madvise(mmap.MADV_HUGEPAGE)
    except OSError:
        return
