"""Streams and events: order of work on the GPU, and its clock."""

from __future__ import annotations

from typing import Any

from whet.backends.cuda.driver import check_status, get_current_device, load_driver, release

_MAX_WRAPPED = 64
_wrapped: dict[int, Stream] = {}  # users' streams by address: wrapping one takes a tenth of the time of a call


class Stream:
    """A non-blocking CUDA stream; launches and copies take its `handle`. `of` wraps a user's stream."""

    def __init__(self) -> None:
        self._device, self._own = get_current_device(), True
        self.handle: Any = check_status(load_driver().cuStreamCreate(load_driver().CUstream_flags.CU_STREAM_NON_BLOCKING.value))

    @classmethod
    def of(cls, stream: Any) -> Stream:
        """A user's stream: an address, an object with `cuda_stream` (torch), `ptr` (CuPy) or `__cuda_stream__` (cuda-core), or a Stream."""
        if isinstance(stream, Stream):
            return stream
        if type(stream) is int:
            return _wrapped.get(stream) or cls._wrap(stream)
        given = getattr(stream, "__cuda_stream__", None)
        if given is not None:
            address = (given() if callable(given) else given)[1]
        else:
            address = getattr(stream, "cuda_stream", getattr(stream, "ptr", stream))
        return cls._wrap(int(address))

    @classmethod
    def _wrap(cls, address: int) -> Stream:
        made = cls.__new__(cls)
        made._device, made._own = get_current_device(), False
        made.handle = load_driver().CUstream(address)
        if len(_wrapped) >= _MAX_WRAPPED:
            _wrapped.clear()
        _wrapped[address] = made
        return made

    def synchronize(self) -> None:
        """Waits until all work on the stream is done. Raises BackendError if a kernel failed."""
        check_status(load_driver().cuStreamSynchronize(self.handle))

    def wait(self, event: Event) -> None:
        """Later work on this stream starts after `event`."""
        check_status(load_driver().cuStreamWaitEvent(self.handle, event.handle, 0))

    def close(self) -> None:
        """Releases the stream; a user's stream stays open."""
        if not self._own:
            return
        handle, self.handle = self.handle, None
        if handle is not None:
            release(self._device, load_driver().cuStreamDestroy, handle)


class Event:
    """A point in a stream's work; with `timing` two of them measure the time between them."""

    def __init__(self, timing: bool = True, blocking: bool = False) -> None:
        """`blocking`: a waiting thread sleeps until the event instead of polling."""
        flags = load_driver().CUevent_flags
        kind = (flags.CU_EVENT_DEFAULT if timing else flags.CU_EVENT_DISABLE_TIMING).value
        self._device = get_current_device()
        self.handle: Any = check_status(load_driver().cuEventCreate(kind | (flags.CU_EVENT_BLOCKING_SYNC.value if blocking else 0)))

    @property
    def done(self) -> bool:
        """True if the event has happened."""
        status = load_driver().cuEventQuery(self.handle)
        if status[0] == load_driver().CUresult.CUDA_ERROR_NOT_READY:
            return False
        check_status(status)
        return True

    def record(self, stream: Stream) -> None:
        """Marks the point after the work given to `stream` so far."""
        check_status(load_driver().cuEventRecord(self.handle, stream.handle))

    def synchronize(self) -> None:
        """Waits on the host for the event."""
        check_status(load_driver().cuEventSynchronize(self.handle))

    def since(self, start: Event) -> float:
        """Milliseconds of GPU time from `start` to this event; both must have happened."""
        return float(check_status(load_driver().cuEventElapsedTime(start.handle, self.handle)))

    def close(self) -> None:
        """Releases the event."""
        handle, self.handle = self.handle, None
        if handle is not None:
            release(self._device, load_driver().cuEventDestroy, handle)
