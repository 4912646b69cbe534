"""One timing at a time on a device: file locks, which the system drops when a process dies however it dies.

Timing (and building, which times kernels) takes a device alone. Other work of a search that loads the same processor (recovery, scoring)
shares it, so that it never runs beside a timing. A second file, the turnstile, keeps those that share from starving those that time.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from platformdirs import user_cache_dir

from whet.errors import BackendError


class DeviceLock:
    """The lock of a device of this machine, the same file for all searches of this user. `folder` is for tests."""

    def __init__(self, device: str, folder: str | os.PathLike[str] | None = None):
        self.folder = Path(folder) if folder is not None else Path(user_cache_dir("whet")) / "locks"
        gpu = physical_gpu(device)
        self.name = "cpu" if gpu is None else f"cuda-{gpu}"
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
        with file_lock(self.folder / f"{self.name}.turn", fcntl.LOCK_EX):
            held = _open(self.folder / f"{self.name}.lock")
            fcntl.flock(held, how)
        try:
            yield
        finally:
            os.close(held)


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


def physical_gpu(device: str) -> str | None:
    """The name (number or UUID) that the machine has for the GPU, whatever CUDA_VISIBLE_DEVICES renames it to; None for a CPU."""
    kind, _, ordinal = device.partition(":")
    if kind != "cuda":
        return None
    visible = [v for v in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if v]
    n = int(ordinal or 0)
    return visible[n] if n < len(visible) else str(n)
