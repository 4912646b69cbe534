"""SIGTERM ends a command like Ctrl-C does: state is saved, and the next run continues."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any


class Terminated(KeyboardInterrupt):
    """SIGTERM. Not KeyboardInterrupt itself: if that leaves an exec(), as of dataclasses during imports, Python ends by SIGINT whatever is caught."""


class Termination:
    """A context in which SIGTERM is handled as SIGINT; `received` is True after one. No effect if the program has its own handler."""

    def __init__(self) -> None:
        self.received = False
        self._before: Any = None

    def __enter__(self) -> Termination:
        if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            self._before = signal.signal(signal.SIGTERM, self._terminate)
        return self

    def __exit__(self, *_: object) -> None:
        if self._before is not None:
            signal.signal(signal.SIGTERM, self._before)

    def _terminate(self, number: int, frame: FrameType | None) -> None:
        self.received = True
        handler = signal.getsignal(signal.SIGINT)
        if callable(handler) and handler is not signal.default_int_handler:
            signal.raise_signal(signal.SIGINT)
        else:  # Python's own, or ignored as in the background jobs of shell scripts
            raise Terminated
