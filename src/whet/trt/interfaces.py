"""TensorRT's interfaces that users implement: profilers, progress monitors, error recorders, readers and writers, debug listeners."""

from __future__ import annotations

from typing import Any

from whet.trt.enums import DataType, ErrorCodeTRT, SeekPosition, TensorLocation
from whet.trt.logger import ILogger


class IProfiler:
    """Base class of profilers: subclasses define `report_layer_time`."""

    def __init__(self) -> None:
        pass

    def report_layer_time(self, layer_name: str, ms: float) -> None:
        """Receives the time of a layer in milliseconds."""
        raise NotImplementedError("a subclass of IProfiler defines report_layer_time(layer_name, ms)")


class Profiler(IProfiler):
    """Prints the times."""

    def report_layer_time(self, layer_name: str, ms: float) -> None:
        """Prints the time of a layer."""
        print(f"{layer_name}: {ms:g}ms")


class IDebugListener:
    """Base class of listeners to debug tensors (`INetworkDefinition.mark_debug`): subclasses define `process_debug_tensor`."""

    def __init__(self) -> None:
        pass

    def process_debug_tensor(self, addr: int, location: TensorLocation, type: DataType, shape: tuple[int, ...], name: str, stream: int) -> bool:
        """Receives a tensor after a run: row-major values in host memory at `addr`, valid during the call. False fails the run."""
        raise NotImplementedError("a subclass of IDebugListener defines process_debug_tensor(addr, location, type, shape, name, stream)")


class IProgressMonitor:
    """Base class of monitors of a build: subclasses define the three methods."""

    def __init__(self) -> None:
        pass

    def phase_start(self, phase_name: str, parent_phase: str | None, num_steps: int) -> None:
        """A phase begins; `num_steps` is 0 if their number is unknown."""
        raise NotImplementedError("a subclass of IProgressMonitor defines phase_start(phase_name, parent_phase, num_steps)")

    def step_complete(self, phase_name: str, step: int) -> bool:
        """Step number `step` of a phase is done. False cancels the build."""
        raise NotImplementedError("a subclass of IProgressMonitor defines step_complete(phase_name, step)")

    def phase_finish(self, phase_name: str) -> None:
        """A phase ends."""
        raise NotImplementedError("a subclass of IProgressMonitor defines phase_finish(phase_name)")


class IErrorRecorder:
    """Base class of error recorders: subclasses define the methods."""

    MAX_DESC_LENGTH = 127

    def __init__(self) -> None:
        pass

    def num_errors(self) -> int:
        """The number of errors."""
        raise NotImplementedError("a subclass of IErrorRecorder defines num_errors()")

    def get_error_code(self, arg0: int) -> ErrorCodeTRT:
        """The code of an error."""
        raise NotImplementedError("a subclass of IErrorRecorder defines get_error_code(index)")

    def get_error_desc(self, arg0: int) -> str:
        """The message of an error."""
        raise NotImplementedError("a subclass of IErrorRecorder defines get_error_desc(index)")

    def has_overflowed(self) -> bool:
        """True if errors were dropped."""
        raise NotImplementedError("a subclass of IErrorRecorder defines has_overflowed()")

    def clear(self) -> None:
        """Forgets the errors."""
        raise NotImplementedError("a subclass of IErrorRecorder defines clear()")

    def report_error(self, arg0: ErrorCodeTRT, arg1: str) -> bool:
        """Receives an error."""
        raise NotImplementedError("a subclass of IErrorRecorder defines report_error(code, desc)")


def report_error(logger: ILogger, recorder: Any, error: object, code: ErrorCodeTRT = ErrorCodeTRT.UNSPECIFIED_ERROR) -> None:
    """Sends an error to the logger, and to the error recorder if there is one."""
    logger.log(ILogger.ERROR, str(error))
    if recorder is not None:
        recorder.report_error(code, str(error))


class IStreamReader:
    """Base class of readers: subclasses define `read(size)`, which returns at most `size` bytes, and none at the end."""

    def __init__(self) -> None:
        pass

    def read(self, size: int) -> bytes:
        """The next bytes."""
        raise NotImplementedError("a subclass of IStreamReader defines read(size)")


class IStreamReaderV2:
    """Base class of readers with a position: subclasses define `read(num_bytes, stream)` and `seek(offset, where)`."""

    def __init__(self) -> None:
        pass

    def read(self, num_bytes: int, stream: int) -> bytes:
        """The next bytes."""
        raise NotImplementedError("a subclass of IStreamReaderV2 defines read(num_bytes, stream)")

    def seek(self, offset: int, where: SeekPosition) -> bool:
        """Moves the position; False if it cannot."""
        raise NotImplementedError("a subclass of IStreamReaderV2 defines seek(offset, where)")


class IStreamWriter:
    """Base class of writers: subclasses define `write`."""

    def __init__(self) -> None:
        pass

    def write(self, data: bytes) -> int:
        """Receives bytes; the number of bytes written."""
        raise NotImplementedError("a subclass of IStreamWriter defines write(data)")


_CHUNK = 1 << 26


def read_all(reader: IStreamReader | IStreamReaderV2) -> bytes:
    """All bytes of a reader."""
    if isinstance(reader, IStreamReaderV2):
        reader.seek(0, SeekPosition.SET)
    parts = []
    while part := reader.read(_CHUNK, 0) if isinstance(reader, IStreamReaderV2) else reader.read(_CHUNK):
        parts.append(bytes(part))
    return b"".join(parts)
