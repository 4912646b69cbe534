"""What a backend is: a machine with memory, a stream to record launches on, an executor and a clock."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from whet.errors import BackendError
from whet.registry import nearest


@dataclass
class Buffer:
    """Memory of the backend: address, bytes, and (host memory only) a NumPy view of them."""

    address: int
    nbytes: int
    array: np.ndarray | None = None
    owner: Any = None  # keeps the memory alive


class Executable(Protocol):
    """A recorded sequence of launches, ready to run again and again."""

    def run(self) -> None:
        """Runs all launches and returns when the results are there."""

    def run_timed(self) -> list[float]:
        """Runs launch by launch; seconds of each (for the profiler; slower as a whole)."""


class Backend(Protocol):
    """A machine. `key()` and `describe()` identify it: in timing keys and engines, and for people."""

    name: str
    threads: int
    features: frozenset[str]
    multiprocessors: int
    shared_memory: int
    l2_bytes: int

    def activate(self) -> None: ...

    def warm(self, array: np.ndarray) -> None: ...

    def evict(self, pieces: Iterable[tuple[int, int]]) -> bool: ...

    def copy(self, target: Buffer, to: int, source: Buffer, at: int, nbytes: int) -> None: ...

    def difference(self, a: Buffer, at: int, b: Buffer, to: int, nbytes: int, dtype: str) -> Any: ...

    def cold_seconds(self, executable: Any, before: Any, other: Buffer) -> float: ...

    def allocate(self, nbytes: int, alignment: int = 64) -> Buffer: ...

    def stream(self) -> Any:
        """A new recording stream (see tactics' Stream); `finish()` makes an Executable of it."""

    def seconds(self, executable: Executable, repeats: int) -> list[float]:
        """Times `repeats` runs of an executable by the backend's clock."""

    def key(self) -> str:
        """Everything about the machine that can change a time or a result: model, features, threads, library versions."""

    def describe(self) -> dict[str, Any]: ...


class Laned(Backend, Protocol):
    """A backend that can run several lists of launches at once, each on a thread of its own (the CPU)."""

    def activate(self) -> None:
        """Makes the calling thread plan and run on as many threads as this backend has."""

    def lanes(self, programs: Sequence[Sequence[Any]]) -> Any:
        """One launch of several lists of launches. Raises BackendError where `why_no_lanes` says so."""

    def why_no_lanes(self, calls: Sequence[Any]) -> str | None:
        """Why launches that were recorded for one thread cannot run in lanes here; None where they can."""


BACKENDS: dict[str, Any] = {}


def backend(cls):
    """Class decorator: registers a backend under its file's or folder's name."""
    name = cls.__module__.split(".")[2]
    if name in BACKENDS:
        raise BackendError(f"backend {name} has two owners")
    cls.name = name
    BACKENDS[name] = cls
    return cls


def get_backend(name: str = "cpu", **options: Any) -> Any:
    """A backend by name. Raises BackendError for an unknown one, or one whose machine or library is missing."""
    if name not in BACKENDS:
        raise BackendError(f"there is no backend {name!r}; there are {', '.join(sorted(BACKENDS))}.{nearest(name, BACKENDS)}")
    return BACKENDS[name](**options)


def in_row(backend: Backend, executables: Sequence[Any]) -> list[float]:
    """Seconds of one run of each executable, by the machine's clock.

    On a GPU they are started one behind the other, as trtexec does for its GPU compute time: around a launch by itself the clock counts the
    microseconds that the host takes to launch, which are as many as a small network's layer takes, differ from run to run, and are the same
    for a large network and a small one.
    """
    if hasattr(backend, "seconds_in_row"):
        return list(backend.seconds_in_row(executables))
    return [backend.seconds(executable, 1)[0] for executable in executables]
