"""Detection of timings taken while other processes or other virtual machines of the host used the CPUs.

External load is measured over windows of some tenths of a second: the kernel counts CPU time in ticks of 10 ms.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

from whet.backends import Backend


class Window(NamedTuple):
    """The timings in a window, and the mean number of CPUs used externally (0.0 below the threshold)."""

    keys: Sequence[str]
    others: float


class ExternalLoadMonitor:
    """Monitors external CPU load. Backends without such a counter (GPU, null) always report none."""

    window_s = 0.3  # minimum length of a window in seconds
    look_s = 0.2  # seconds of observation to decide that there is no external load
    valid_s = 2.0  # seconds for which that decision is valid

    def __init__(self, backend: Backend):
        self._watch = backend.watch if backend.capabilities.measures_load else None
        self._open: AbstractContextManager | None = None
        self._load: Any = None
        self._keys: list[str] = []
        self._since = 0.0
        self._looked: tuple[float, bool] | None = None

    def begin(self) -> None:
        """Opens a window before a timing unless one is open."""
        if self._watch is not None and self._open is None:
            self._open = self._watch()
            self._load, self._since = self._open.__enter__(), time.monotonic()

    def record(self, key: str) -> Window:
        """Records the timing `key`. Returns the window if it ends here, else an empty one."""
        self._keys.append(key)
        return self.end() if time.monotonic() - self._since >= self.window_s else Window((), 0.0)

    def end(self) -> Window:
        """Ends the window, waiting if it is too short to measure."""
        keys, self._keys = self._keys, []
        if self._open is None:
            return Window(keys, 0.0)
        time.sleep(max(0.0, self.look_s - (time.monotonic() - self._since)))
        self._open.__exit__(None, None, None)
        self._open = None
        return Window(keys, self._load.others if self._load.disturbed else 0.0)

    def quiet(self) -> bool:
        """True if there is no external load now."""
        if self._watch is None:
            return True
        if self._looked is None or time.monotonic() - self._looked[0] > self.valid_s:
            with self._watch() as load:
                time.sleep(self.look_s)
            self._looked = (time.monotonic(), not load.disturbed)
        return self._looked[1]
