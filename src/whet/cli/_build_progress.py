"""The progress bar of a build: which stage, what is being timed now, how long it will take. On standard error, only on a terminal."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any

from whet.cli._console import progress_bar


class BuildProgress:
    """A builder's Progress on a rich bar; a context manager. Disabled, it only collects notes, and sees to it that Ctrl-C is heard.

    Python drops an exception that is raised where an object is being cleared away, KeyboardInterrupt too; so it is
    raised again at the next step.
    """

    def __init__(self, enabled: bool = True):
        self.enabled = enabled
        self.notes: list[str] = []
        self._bar: Any = None
        self._task: Any = None
        self._interrupted = False
        self._before: Any = None  # what handled Ctrl-C; None where somebody else sees to it

    def __enter__(self) -> BuildProgress:
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler and threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGINT, self._interrupt)
        if self.enabled:
            self._bar = progress_bar()
            self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)
        if self._bar is not None:
            self._bar.stop()
        if kind is None:
            self._heed()

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        self._interrupted = True
        raise KeyboardInterrupt

    def stage(self, name: str, total: int) -> None:
        self._heed()
        if self._bar is None:
            return
        if self._task is not None:
            self._bar.remove_task(self._task)
        self._task = self._bar.add_task(name, total=total or None, what="")

    def _heed(self) -> None:
        if self._interrupted:
            raise KeyboardInterrupt

    def step(self, what: str, done: int = 1) -> None:
        self._heed()
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, advance=done, what=what[:80])

    def note(self, text: str) -> None:
        self.notes.append(text)
