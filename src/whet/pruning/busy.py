"""Which times were taken while other processes, or other guests of the host, used the CPUs.

It is told over windows of some tenths of a second: the system counts in ticks of 10 ms, and most kernels run for less.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

from whet.backends import Backend

_WINDOW = 0.3  # seconds, at least, that a window is open
_LOOK = 0.2  # seconds that are looked at to say whether others rest
_BELIEVED = 2.0  # seconds for which that answer stands


class Window(NamedTuple):
    """What was timed in it, and how many CPUs others used meanwhile; 0.0 where that was too little to matter."""

    keys: Sequence[str]
    others: float


class Neighbours:
    """Watches what others take of a machine's CPUs. A machine that cannot tell (a GPU, the null machine) is always quiet."""

    def __init__(self, backend: Backend):
        self._watch = backend.watch if backend.capabilities.measures_load else None
        self._open: AbstractContextManager | None = None
        self._load: Any = None
        self._keys: list[str] = []
        self._since = 0.0
        self._looked: tuple[float, bool] | None = None

    def begin(self) -> None:
        """Before something is timed: opens a window unless one is open."""
        if self._watch is not None and self._open is None:
            self._open = self._watch()
            self._load, self._since = self._open.__enter__(), time.monotonic()

    def took(self, key: str) -> Window:
        """What `key` names was timed. Gives the window if it ends with it, else an empty one."""
        self._keys.append(key)
        return self.end() if time.monotonic() - self._since >= _WINDOW else Window((), 0.0)

    def end(self) -> Window:
        """Ends the window; one that was open too briefly to tell anything lasts a moment longer."""
        keys, self._keys = self._keys, []
        if self._open is None:
            return Window(keys, 0.0)
        time.sleep(max(0.0, _LOOK - (time.monotonic() - self._since)))
        self._open.__exit__(None, None, None)
        self._open = None
        return Window(keys, self._load.others if self._load.disturbed else 0.0)

    def quiet(self) -> bool:
        """Whether others leave the CPUs alone now."""
        if self._watch is None:
            return True
        if self._looked is None or time.monotonic() - self._looked[0] > _BELIEVED:
            with self._watch() as load:
                time.sleep(_LOOK)
            self._looked = (time.monotonic(), not load.disturbed)
        return self._looked[1]
