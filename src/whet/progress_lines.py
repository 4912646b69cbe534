"""Progress without a terminal: a line on standard error every ten seconds that names the current activity.

A thread prints the lines, so that an activity without steps of its own (reading a large model, one long step) is not silent either. There is one
set of lines per process: what starts inside adds its activity to the lines of the command that runs.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, TextIO

from whet.forks import make_lock

SECONDS = 10.0
VARIABLE = "WHET_PROGRESS_SECONDS"  # other seconds between two lines; 0: no lines
_WIDTH = 200

Activity = Callable[[], str]

_lock = make_lock()
_activities: list[Activity] = []  # from the outermost to the innermost
_printer: _Printer | None = None


class ProgressLines:
    """A context manager that names an activity in the progress lines; the outermost one starts and stops the lines.

    `activity` is a text, or a function that returns the current one and is called in another thread. Nothing is printed within the first
    `seconds` (default: those of WHET_PROGRESS_SECONDS, else ten).
    """

    def __init__(self, activity: str | Activity, stream: TextIO | None = None, seconds: float | None = None):
        self._activity: Activity = (lambda: activity) if isinstance(activity, str) else activity
        self._stream, self._seconds = stream, seconds

    def __enter__(self) -> ProgressLines:
        global _printer
        with _lock:
            _activities.append(self._activity)
            if _printer is None:
                seconds = get_interval() if self._seconds is None else self._seconds
                if seconds > 0:
                    _printer = _Printer(self._activity, seconds, self._stream or sys.stderr)
                    _printer.start()
        return self

    def __exit__(self, *_: Any) -> None:
        global _printer
        with _lock:
            ended = _printer if _printer is not None and _printer.owner is self._activity else None
            if ended is not None:
                _printer = None
        if ended is not None:
            ended.stop()
        with _lock:
            _activities.remove(self._activity)


def get_interval() -> float:
    """Seconds between two lines: ten, or those of the environment variable WHET_PROGRESS_SECONDS; 0: no lines."""
    try:
        return max(float(os.environ.get(VARIABLE, SECONDS)), 0.0)
    except ValueError:
        return SECONDS


class _Printer(threading.Thread):
    def __init__(self, owner: Activity, seconds: float, stream: TextIO):
        super().__init__(name="whet progress lines", daemon=True)
        self.owner = owner
        self._seconds, self._stream = seconds, stream
        self._began, self._over, self._process = time.monotonic(), threading.Event(), os.getpid()

    def run(self) -> None:
        while not self._over.wait(self._seconds):
            try:
                self._stream.write(self._format_line())
                self._stream.flush()
            except (OSError, ValueError):  # the reader of a pipe ended, or the stream was closed: the work continues
                return

    def stop(self) -> None:
        """Ends the lines. In a child of fork() there is no thread to wait for."""
        self._over.set()
        if self._process == os.getpid() and self is not threading.current_thread():
            self.join()

    def _format_line(self) -> str:
        parts = []
        for activity in list(_activities):
            try:
                parts.append(activity())
            except (RuntimeError, LookupError, AttributeError):  # the activity changed its state at this moment
                continue
        text = ", ".join(p for p in parts if p).replace("\n", " ")
        return f"{time.monotonic() - self._began:.0f} s: {text[:_WIDTH]}\n"


class Steps:
    """The text of an activity with steps: what is done, how many steps of how many, the current item."""

    def __init__(self, name: str = ""):
        self.name, self.done, self.total, self.note = name, 0, 0, ""

    def update(self, done: int, total: int, note: str) -> None:
        """`done` of `total` steps are finished (total 0: their number is unknown); `note` describes the current one."""
        self.done, self.total, self.note = done, total, note

    def __call__(self) -> str:
        count = f" {self.done} of {self.total}" if self.total else f" {self.done}" if self.done else ""
        return f"{self.name}{count}{': ' if self.note else ''}{self.note[:80]}"
