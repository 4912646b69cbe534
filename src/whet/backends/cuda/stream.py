"""Streams and events: order on the GPU, and its clock."""

from __future__ import annotations

from whet.backends.cuda.driver import cu, ok


class Stream:
    """A non-blocking CUDA stream; `handle` is what launches and copies take."""

    def __init__(self) -> None:
        self.handle = ok(cu().cuStreamCreate(cu().CUstream_flags.CU_STREAM_NON_BLOCKING.value))

    def synchronize(self) -> None:
        """Wait until all work on the stream is done; a failed kernel raises BackendError here."""
        ok(cu().cuStreamSynchronize(self.handle))

    def wait(self, event: Event) -> None:
        """Work that follows on this stream starts after `event`."""
        ok(cu().cuStreamWaitEvent(self.handle, event.handle, 0))

    def close(self) -> None:
        """Give the stream back."""
        handle, self.handle = self.handle, None
        if handle is not None:
            ok(cu().cuStreamDestroy(handle))


class Event:
    """A point in a stream's work; with `timing` two of them measure what lies between."""

    def __init__(self, timing: bool = True) -> None:
        flags = cu().CUevent_flags
        self.handle = ok(cu().cuEventCreate((flags.CU_EVENT_DEFAULT if timing else flags.CU_EVENT_DISABLE_TIMING).value))

    def record(self, stream: Stream) -> None:
        """Mark the point after the work given to `stream` so far."""
        ok(cu().cuEventRecord(self.handle, stream.handle))

    def synchronize(self) -> None:
        """Wait on the host for the event."""
        ok(cu().cuEventSynchronize(self.handle))

    def since(self, start: Event) -> float:
        """Milliseconds of GPU time from `start` to this event; both must have happened."""
        return float(ok(cu().cuEventElapsedTime(start.handle, self.handle)))

    def close(self) -> None:
        """Give the event back."""
        handle, self.handle = self.handle, None
        if handle is not None:
            ok(cu().cuEventDestroy(handle))
