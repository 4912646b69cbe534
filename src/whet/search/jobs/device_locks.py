"""File locks that allow one timing at a time per device; the operating system releases them when a process exits for any reason.

Timing (and building, which times kernels) holds the lock exclusively. Other work that loads the same processor (recovery, scoring) holds it
shared, so it never overlaps a timing. A second lock file, a turnstile, keeps shared holders from starving exclusive ones.

The package filelock has no shared flock, and waits by polling every 50 ms: a lock changed hands in 17 ms (median; 84 ms at most) instead of 4 ms.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from platformdirs import user_cache_dir

from whet.backends import get_capabilities
from whet.errors import BackendError


class DeviceLock:
    """The lock of a device of this machine, shared by all searches of this user. `folder` is for tests.

    `waiting` is called with a description of the holder while the lock is unavailable, and with None once it is acquired.
    """

    def __init__(self, device: str, folder: str | os.PathLike[str] | None = None, waiting: Callable[[str | None], object] = lambda _: None):
        self.waiting = waiting
        self.folder = Path(folder) if folder is not None else Path(user_cache_dir("whet")) / "locks"
        gpu = find_physical_gpu(device)
        self.name = "cpu" if gpu is None else f"{device.partition(':')[0]}-{find_uuid(gpu)}"
        self.shares = gpu is None  # CPU load does not disturb the timing of a CUDA graph
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as e:
            raise BackendError(f"cannot create the folder of the timing locks, {self.folder}: {e.strerror}. Set XDG_CACHE_HOME.") from e

    @contextmanager
    def timing(self) -> Iterator[None]:
        """Holds the device exclusively."""
        with self._acquire(fcntl.LOCK_EX):
            yield

    @contextmanager
    def hold_for_work(self) -> Iterator[None]:
        """Holds the device shared: overlaps other work, never a timing. No lock for a GPU, since this work runs on the CPU."""
        if not self.shares:
            yield
            return
        with self._acquire(fcntl.LOCK_SH):
            yield

    @contextmanager
    def training(self) -> Iterator[None]:
        """Holds the device for fine-tuning: shared on a CPU, exclusively on a GPU."""
        with self.hold_for_work() if self.shares else self.timing():
            yield

    @contextmanager
    def _acquire(self, how: int) -> Iterator[None]:
        turn, held = (_open(self.folder / f"{self.name}.{what}") for what in ("turn", "lock"))
        try:
            waited = [self._lock_file(turn, fcntl.LOCK_EX, held), self._lock_file(held, how, held)]
            os.ftruncate(held, 0)
            if how == fcntl.LOCK_EX:
                os.pwrite(held, str(os.getpid()).encode(), 0)
        finally:
            os.close(turn)
        if any(waited):
            self.waiting(None)
        try:
            yield
        finally:
            os.close(held)

    def _lock_file(self, f: int, how: int, lock: int) -> bool:
        """Acquires a lock; returns True if it had to wait."""
        try:
            fcntl.flock(f, how | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(lock, 20, 0).decode()
            self.waiting(f"process {holder} is timing" if holder else "other processes are computing")
            fcntl.flock(f, how)
            return True
        return False


@contextmanager
def hold_file_lock(path: str | os.PathLike[str], how: int = fcntl.LOCK_EX) -> Iterator[bool]:
    """Holds a lock file; with LOCK_NB yields False instead of waiting. Closing the file, also by process exit, releases the lock."""
    f = _open(Path(path))
    try:
        try:
            fcntl.flock(f, how)
            acquired = True
        except BlockingIOError:
            acquired = False
        yield acquired
    finally:
        os.close(f)


def _open(path: Path) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)


def find_uuid(gpu: str) -> str:
    """A GPU's UUID, so that a search that names it by number and one that names it by UUID share a lock; `gpu` unchanged without NVML."""
    try:
        import pynvml
    except ImportError:
        return gpu
    try:
        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByIndex(int(gpu)) if gpu.isdigit() else pynvml.nvmlDeviceGetHandleByUUID(gpu)
        return str(pynvml.nvmlDeviceGetUUID(handle))
    except pynvml.NVMLError:
        return gpu


def find_physical_gpu(device: str) -> str | None:
    """The GPU's physical number or UUID, with CUDA_VISIBLE_DEVICES resolved; None for a CPU."""
    kind, _, ordinal = device.partition(":")
    if not get_capabilities(kind).numbered_devices:
        return None
    visible = [v for v in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if v]
    n = int(ordinal or 0)
    return visible[n] if n < len(visible) else str(n)
