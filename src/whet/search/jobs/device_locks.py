"""One timing at a time on a device: file locks, which the system drops when a process dies however it dies.

Timing (and building, which times kernels) takes a device alone. Other work of a search that loads the same processor (recovery, scoring)
shares it, so that it never runs beside a timing. A second file, the turnstile, keeps those that share from starving those that time.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from platformdirs import user_cache_dir

from whet.backends import capabilities_of
from whet.errors import BackendError


class DeviceLock:
    """The lock of a device of this machine, the same file for all searches of this user. `folder` is for tests.

    `waiting` is told who holds the device, in words, where it must be waited for; and None when it is had.
    """

    def __init__(self, device: str, folder: str | os.PathLike[str] | None = None, waiting: Callable[[str | None], object] = lambda _: None):
        self.waiting = waiting
        self.folder = Path(folder) if folder is not None else Path(user_cache_dir("whet")) / "locks"
        gpu = physical_gpu(device)
        self.name = "cpu" if gpu is None else f"{device.partition(':')[0]}-{uuid_of(gpu)}"
        self.shares = gpu is None  # what loads the CPU does not disturb a GPU's graph
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as e:
            raise BackendError(f"the folder of the timing locks, {self.folder}, cannot be made: {e.strerror}. Set XDG_CACHE_HOME.") from e

    @contextmanager
    def timing(self) -> Iterator[None]:
        """Alone on the device."""
        with self._held(fcntl.LOCK_EX):
            yield

    @contextmanager
    def working(self) -> Iterator[None]:
        """Beside other work, never beside a timing. On a GPU nothing is held: this work runs on the CPU."""
        if not self.shares:
            yield
            return
        with self._held(fcntl.LOCK_SH):
            yield

    @contextmanager
    def training(self) -> Iterator[None]:
        """Fine-tuning: as other work on a CPU, alone on a GPU, which it keeps as busy as a timing does."""
        with self.working() if self.shares else self.timing():
            yield

    @contextmanager
    def _held(self, how: int) -> Iterator[None]:
        turn, held = (_open(self.folder / f"{self.name}.{what}") for what in ("turn", "lock"))
        try:
            waited = [self._taken(turn, fcntl.LOCK_EX, held), self._taken(held, how, held)]
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

    def _taken(self, f: int, how: int, held: int) -> bool:
        """Takes a lock; gives whether it had to be waited for."""
        try:
            fcntl.flock(f, how | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(held, 20, 0).decode()
            self.waiting(f"process {holder} times on it" if holder else "others compute on it")
            fcntl.flock(f, how)
            return True
        return False


@contextmanager
def file_lock(path: str | os.PathLike[str], how: int = fcntl.LOCK_EX) -> Iterator[bool]:
    """Holds a lock file; with LOCK_NB gives False instead of waiting. Closing the file, also by dying, lets go."""
    f = _open(Path(path))
    try:
        try:
            fcntl.flock(f, how)
            got = True
        except BlockingIOError:
            got = False
        yield got
    finally:
        os.close(f)


def _open(path: Path) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)


def uuid_of(gpu: str) -> str:
    """A GPU's UUID, so that one search that calls it by number and one that calls it by UUID share a lock; `gpu` as it is where NVML does not say."""
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


def physical_gpu(device: str) -> str | None:
    """The name (number or UUID) that the machine has for the GPU, whatever CUDA_VISIBLE_DEVICES renames it to; None for a CPU."""
    kind, _, ordinal = device.partition(":")
    if not capabilities_of(kind).numbered_devices:
        return None
    visible = [v for v in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if v]
    n = int(ordinal or 0)
    return visible[n] if n < len(visible) else str(n)
