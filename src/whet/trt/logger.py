"""Logger: the message sink of builders, parsers and runtimes."""

from __future__ import annotations

import sys

from whet.trt.enums import NamedInt


class LogSeverity(NamedInt):
    """Severity of a message; lower is more severe."""

    INTERNAL_ERROR = 0
    ERROR = 1
    WARNING = 2
    INFO = 3
    VERBOSE = 4


class ILogger:
    """Base class of loggers: subclasses define `log(severity, msg)`."""

    Severity = LogSeverity
    INTERNAL_ERROR, ERROR, WARNING, INFO, VERBOSE = LogSeverity

    def __init__(self) -> None:
        pass

    def log(self, severity: LogSeverity, msg: str) -> None:
        """Receives one message."""
        raise NotImplementedError("a subclass of ILogger defines log(severity, msg)")


class Logger(ILogger):
    """Prints messages of `min_severity` and more severe ones to stderr."""

    def __init__(self, min_severity: LogSeverity = LogSeverity.WARNING):
        super().__init__()
        self.min_severity = min_severity

    def log(self, severity: LogSeverity, msg: str) -> None:
        """Prints `msg` with TensorRT's prefix."""
        if severity <= self.min_severity:
            print(f"[TRT] [{LogSeverity(severity).name[0]}] {msg}", file=sys.stderr)
