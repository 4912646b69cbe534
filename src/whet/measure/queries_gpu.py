"""Timing inference on a GPU as trtexec does: copies in, compute and copies out on separate CUDA streams, double-buffered, timed with
events. The host enqueues a query and waits for the one enqueued two queries before.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np

from whet.backends.cuda.memory import DeviceBuffer, PinnedBuffer
from whet.backends.cuda.stream import Event, Stream
from whet.errors import BackendError
from whet.measure.queries import Measured, Trace
from whet.network import compute_stored_shape, static_shape, to_stored

DEPTH = 2  # queries in flight per inference stream: the next query's inputs are copied during the compute


class Slot:
    """The state of one query in flight: pinned host memory, device memory, events around copies and compute."""

    def __init__(self, context: Any, feed: dict[str, np.ndarray], spin: bool) -> None:
        for name, a in feed.items():
            context.set_input_shape(name, a.shape)
        self.context, self.bound = context, context.launches()
        self.bound.feed(feed)
        self.bound.executable.prepare()
        self.sources, self.results = self._list_pinned_buffers(feed), self._list_pinned_buffers(None)
        self.events = [Event(blocking=not spin) for _ in range(6)]  # around the copies in, the compute, the copies out
        self.host = (0.0, 0.0)  # start and end of the enqueue, seconds
        self.busy = False

    def _list_pinned_buffers(self, feed: dict[str, np.ndarray] | None) -> list[tuple[int, PinnedBuffer]]:
        """Returns (offset in the arena, pinned buffer) of the inputs in the engine's formats, or of the outputs if `feed` is None."""
        net, buffers = self.bound.network, []
        for t in net.inputs if feed is not None else net.outputs:
            if t.is_constant:
                continue
            o, (at, nbytes) = self.bound.shaped.operands[t.name], self.bound.place(t.name)
            buffer = PinnedBuffer(nbytes)
            if feed is not None and nbytes:
                shape = static_shape(compute_stored_shape(o.format, static_shape(self.bound.shaped.types[t.name].shape)))
                stored = to_stored(feed[t.name].astype(o.dtype.numpy, copy=False), o.format)
                assert stored.shape == shape
                buffer.array[:] = stored.reshape(-1).view(np.uint8)
            buffers.append((at, buffer))
        return buffers

    def start(self, streams: tuple[Stream, Stream, Stream], transfers: bool, other: DeviceBuffer | None) -> None:
        """Enqueues a query. Between its copies in and its compute, `other` memory is written, which evicts the L2 cache."""
        copying_in, computing, copying_out = streams
        memory = self.bound.arena.owner
        begin_in, end_in, begin, end, begin_out, end_out = self.events
        if transfers:
            begin_in.record(copying_in)
            for at, buffer in self.sources:
                memory.start_write(buffer, copying_in, at)
            end_in.record(copying_in)
            computing.wait(end_in)
        if other is not None:
            other.start_fill(computing)
        begin.record(computing)
        started = time.perf_counter()
        self.bound.executable.enqueue(computing)
        self.host = (started, time.perf_counter())
        end.record(computing)
        if transfers:
            copying_out.wait(end)
            begin_out.record(copying_out)
            for at, buffer in self.results:
                memory.start_read(buffer, copying_out, at)
            end_out.record(copying_out)
        self.busy = True

    def finish(self, base: Event, zero: float, transfers: bool) -> Trace:
        """Waits for the query and returns its times in milliseconds after `base` (host time `zero`)."""
        self.events[5 if transfers else 3].synchronize()
        self.busy = False
        begin, end = self.events[2].since(base), self.events[3].since(base)
        a, b = (self.events[0].since(base), self.events[1].since(base)) if transfers else (begin, begin)
        c, d = (self.events[4].since(base), self.events[5].since(base)) if transfers else (end, end)
        return Trace((self.host[0] - zero) * 1e3, (self.host[1] - zero) * 1e3, a, b, begin, end, c, d)


def measure_gpu(
    engine: Any,
    profile: int | None,
    feed: dict[str, np.ndarray],
    *,
    streams: int = 1,
    warmup_ms: float = 200,
    duration_s: float = 3,
    iterations: int = 10,
    transfers: bool = True,
    overlap: bool = True,
    idle_ms: float = 0,
    spin: bool = False,
    graph: bool = True,
    cold: bool = False,
    tick: Callable[[float], None] | None = None,
) -> Measured:
    """Runs queries on `streams` concurrent streams for at least `duration_s` seconds and `iterations` rounds, from one host thread.

    With `overlap` False each query ends before the next is enqueued; with `graph` False kernels are launched one by one; with `cold` the L2
    cache is flushed before the compute of each query (the wall time includes the flush).
    """
    depth = DEPTH if overlap else 1
    other = DeviceBuffer(2 * engine.backend.capabilities.cache_bytes[2]) if cold else None
    pipelines = []
    for _ in range(streams):
        slots = [Slot(engine.create_context(profile), feed, spin) for _ in range(depth)]
        for slot in slots:
            slot.bound.executable.use_graph = graph
        pipelines.append((slots, (Stream(), Stream(), Stream())))
    base, count = Event(), 0
    base.record(pipelines[0][1][1])
    base.synchronize()
    zero = time.perf_counter()
    traces: list[Trace] = []

    def run_round(recorded: list[Trace] | None) -> None:
        nonlocal count
        for slots, cuda_streams in pipelines:
            slot = slots[count % depth]
            if slot.busy:
                trace = slot.finish(base, zero, transfers)
                if recorded is not None:
                    recorded.append(trace)
            slot.start(cuda_streams, transfers, other)
            if not overlap:
                trace = slot.finish(base, zero, transfers)
                if recorded is not None:
                    recorded.append(trace)
        count += 1

    def drain() -> list[Trace]:
        return [slot.finish(base, zero, transfers) for slots, _ in pipelines for slot in slots if slot.busy]

    warm = 0
    limit = time.perf_counter() + warmup_ms / 1e3
    while time.perf_counter() < limit:
        run_round(None)
        warm += streams
    drain()
    begun, rounds = time.perf_counter(), 0
    while True:
        run_round(traces)
        rounds += 1
        if idle_ms:
            time.sleep(idle_ms / 1e3)
        spent = time.perf_counter() - begun
        if tick is not None and rounds % 64 == 0:
            tick(min(spent / duration_s if duration_s > 0 else 1.0, 1.0))
        if rounds >= iterations and 0 <= duration_s <= spent:
            break
    traces += drain()
    wall = time.perf_counter() - begun
    if not traces:
        raise BackendError("no query was finished. This is a mistake in whet: please report it.")
    return Measured(sorted(traces, key=lambda t: t.startComputeMs), wall, warm, streams)
