"""The progress of a build on standard error: a bar with stage, candidate and time left on a terminal, else a line every ten seconds."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any

from whet.cli._console import make_progress_bar
from whet.progress_lines import ProgressLines, Steps


class BuildProgress:
    """The builder's Progress as a rich bar; a context manager. Disabled, it prints lines, collects notes and handles Ctrl-C.

    Python drops exceptions raised in finalizers, including KeyboardInterrupt, so an interrupt is raised again at the next step.
    """

    def __init__(self, enabled: bool = True):
        self.enabled = enabled
        self.notes: list[str] = []
        self._steps = Steps("building")
        self._lines = ProgressLines(self._steps)
        self.bar: Any = None
        self._task: Any = None
        self._interrupted = False
        self._previous_handler: Any = None  # of SIGINT; None while this bar does not handle it

    def __enter__(self) -> BuildProgress:
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler and threading.current_thread() is threading.main_thread():
            self._previous_handler = signal.signal(signal.SIGINT, self._interrupt)
        if self.enabled:
            self.bar = make_progress_bar()
            self.bar.start()
        else:
            self._lines.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._previous_handler is not None:
            signal.signal(signal.SIGINT, self._previous_handler)
        if self.bar is not None:
            self.bar.stop()
        else:
            self._lines.__exit__()
        if kind is None:
            self._raise_interrupt()

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        self._interrupted = True
        raise KeyboardInterrupt

    def stage(self, name: str, total: int) -> None:
        self._raise_interrupt()
        self._steps.name = name
        self._steps.update(0, total, "")
        if self.bar is None:
            return
        if self._task is not None:
            self.bar.remove_task(self._task)
        self._task = self.bar.add_task(name, total=total or None, what="")

    def _raise_interrupt(self) -> None:
        if self._interrupted:
            raise KeyboardInterrupt

    def step(self, description: str, done: int = 1) -> None:
        self._raise_interrupt()
        self._steps.update(self._steps.done + done, self._steps.total, description)
        if self.bar is not None and self._task is not None:
            self.bar.update(self._task, advance=done, what=description[:80])

    def note(self, text: str) -> None:
        self.notes.append(text)
