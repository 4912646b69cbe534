"""Timing inference on a GPU as trtexec does: copies in, compute and copies out on streams of their own, two sets of buffers for each
stream of inference, times by events on the GPU; the host only starts work and waits for what it started two queries ago.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np

from whet.backends.cuda.memory import DeviceBuffer, PinnedBuffer
from whet.backends.cuda.stream import Event, Stream
from whet.cli._measure import Measured, Trace
from whet.errors import BackendError
from whet.network import static_shape, stored_shape, to_stored

DEPTH = 2  # queries of a stream under way at once: while one computes, the next one's inputs are copied


class Slot:
    """Everything of one query under way: memory on both sides, events around its parts."""

    def __init__(self, context: Any, feed: dict[str, np.ndarray], spin: bool) -> None:
        for name, a in feed.items():
            context.set_input_shape(name, a.shape)
        self.context, self.bound = context, context.launches()
        self.bound.feed(feed)
        self.bound.executable.prepare()
        self.sources, self.results = self._pinned(feed), self._pinned(None)
        self.events = [Event(blocking=not spin) for _ in range(6)]  # around the copies in, the compute, the copies out
        self.host = (0.0, 0.0)  # enqueue began and ended
        self.busy = False

    def _pinned(self, feed: dict[str, np.ndarray] | None) -> list[tuple[int, PinnedBuffer]]:
        """(offset in the arena, page-locked memory) of inputs as the engine stores them, or of outputs."""
        net, found = self.bound.network, []
        for t in net.inputs if feed is not None else net.outputs:
            if t.is_constant:
                continue
            o, (at, nbytes) = self.bound.shaped.operands[t.name], self.bound.place(t.name)
            buffer = PinnedBuffer(nbytes)
            if feed is not None and nbytes:
                shape = static_shape(stored_shape(o.format, static_shape(self.bound.shaped.types[t.name].shape)))
                stored = to_stored(feed[t.name].astype(o.dtype.numpy, copy=False), o.format)
                assert stored.shape == shape
                buffer.array[:] = stored.reshape(-1).view(np.uint8)
            found.append((at, buffer))
        return found

    def start(self, streams: tuple[Stream, Stream, Stream], transfers: bool, other: DeviceBuffer | None) -> None:
        """Puts a query on the streams; between its inputs and its compute `other` memory is written, which takes the L2 cache."""
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
        """Waits for the query and tells its times, milliseconds after `base` (which the host saw at `zero`)."""
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
    """Queries on `streams` streams at once for at least `duration_s` seconds and `iterations` rounds. One thread of the host starts all.

    `overlap` False waits for each query before the next is started; `graph` False launches kernel by kernel; with `cold` the compute of each
    query finds nothing in the L2 cache, as after other work (and the wall clock has the time of emptying it).
    """
    depth = DEPTH if overlap else 1
    other = DeviceBuffer(2 * engine.backend.capabilities.cache_bytes[2]) if cold else None
    lanes = []
    for _ in range(streams):
        slots = [Slot(engine.create_context(profile), feed, spin) for _ in range(depth)]
        for slot in slots:
            slot.bound.executable.use_graph = graph
        lanes.append((slots, (Stream(), Stream(), Stream())))
    base, count = Event(), 0
    base.record(lanes[0][1][1])
    base.synchronize()
    zero = time.perf_counter()
    traces: list[Trace] = []

    def one_round(kept: list[Trace] | None) -> None:
        nonlocal count
        for slots, three in lanes:
            slot = slots[count % depth]
            if slot.busy:
                trace = slot.finish(base, zero, transfers)
                if kept is not None:
                    kept.append(trace)
            slot.start(three, transfers, other)
            if not overlap:
                trace = slot.finish(base, zero, transfers)
                if kept is not None:
                    kept.append(trace)
        count += 1

    def drain() -> list[Trace]:
        return [slot.finish(base, zero, transfers) for slots, _ in lanes for slot in slots if slot.busy]

    warm = 0
    limit = time.perf_counter() + warmup_ms / 1e3
    while time.perf_counter() < limit:
        one_round(None)
        warm += streams
    drain()
    begun, rounds = time.perf_counter(), 0
    while True:
        one_round(traces)
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
