"""A backend that plans everything and runs nothing: times come from its tactics' cost table, so they are the same on every machine.

Builds, memory plans, tactic selection and golden engines are tested with it, without timing noise.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from whet.backends._base import Backend, Buffer, Capabilities, Executable, backend
from whet.errors import BackendError


class NullExecutable(Executable):
    """A launch list that reports the table's `cost` in seconds and executes nothing."""

    def __init__(self, calls: list):
        self.calls = list(calls)

    def run(self) -> None:
        """Does nothing: values in memory stay as they are."""

    def run_timed(self) -> list[float]:
        """Seconds of each launch by the cost table."""
        return [float(c.cost) for c in self.calls]


class NullList:
    """A stream that stores recorded launches."""

    def __init__(self) -> None:
        self.calls: list = []

    def record(self, call) -> None:
        self.calls.append(call)

    def finish(self) -> NullExecutable:
        return NullExecutable(self.calls)


@backend
class NullBackend(Backend):
    """The null machine. Memory has addresses but no bytes: writes are discarded, reads return zeros."""

    capabilities = Capabilities(executes=False, host_memory=False)

    def __init__(self, threads: int = 0, **_: Any):
        self.threads = threads or 1
        self._next = 1 << 20

    def allocate(self, nbytes: int, alignment: int = 64) -> Buffer:
        """A unique address range."""
        if nbytes < 0 or alignment < 1:
            raise BackendError(f"cannot allocate {nbytes} bytes aligned to {alignment}")
        at = -(-self._next // alignment) * alignment
        self._next = at + nbytes
        return Buffer(at, nbytes)

    def read(self, buffer: Buffer, offset: int, nbytes: int) -> np.ndarray:
        """Zeros."""
        return np.zeros(nbytes, np.uint8)

    def write(self, buffer: Buffer, offset: int, data: np.ndarray) -> None:
        """Discards the data."""

    def stream(self) -> NullList:
        return NullList()

    def seconds(self, executable: NullExecutable, repeats: int) -> list[float]:
        """The cost table's time, `repeats` times."""
        return [sum(executable.run_timed())] * repeats

    def key(self) -> str:
        return f"null threads={self.threads}"

    def describe(self) -> dict[str, Any]:
        return {"backend": "null", "model": "plans everything, runs nothing", "threads": self.threads}
