"""The progress of a build as TensorRT's IProgressMonitor receives it."""

from __future__ import annotations

from whet.errors import BuildError
from whet.trt.interfaces import IProgressMonitor
from whet.trt.logger import ILogger

_BUILD = "Building Engine"


class MonitoredProgress:
    """A whet.builder.Progress that reports stages as phases of "Building Engine", and notes as warnings to the logger."""

    def __init__(self, monitor: IProgressMonitor | None, logger: ILogger):
        self._monitor, self._logger = monitor, logger
        self._phase, self._steps, self._phases = "", 0, 0

    def __enter__(self) -> MonitoredProgress:
        if self._monitor is not None:
            self._monitor.phase_start(_BUILD, None, 1)  # monitors divide by the number of steps
        return self

    def __exit__(self, *_: object) -> None:
        self._finish()
        if self._monitor is not None:
            self._monitor.phase_finish(_BUILD)

    def stage(self, name: str, total: int) -> None:
        """A phase begins."""
        self._finish()
        if self._monitor is not None:
            self._phase, self._steps = name, 0
            self._monitor.phase_start(name, _BUILD, max(total, 1))

    def step(self, description: str, done: int = 1) -> None:
        """Steps are done. Raises BuildError if the monitor cancels the build."""
        if self._monitor is None or not self._phase:
            return
        self._steps += done
        if not self._monitor.step_complete(self._phase, self._steps - 1):
            raise BuildError(f"the progress monitor cancelled the build in the phase {self._phase!r}")

    def note(self, text: str) -> None:
        """A warning."""
        self._logger.log(ILogger.WARNING, text)

    def _finish(self) -> None:
        if self._monitor is not None and self._phase:
            self._monitor.phase_finish(self._phase)
            self._phase = ""
