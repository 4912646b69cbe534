"""Recorded launches on a GPU: one CUDA graph, replayed on any stream; launch by launch for the profiler, and if no graph can be captured."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

from whet.backends._base import Call, Executable
from whet.backends.cuda import nvtx
from whet.backends.cuda.driver import Device, LostContext
from whet.backends.cuda.launch import GpuWork, Graph
from whet.backends.cuda.memory import DeviceBuffer
from whet.backends.cuda.stream import Event, Stream
from whet.errors import BackendError

REPEATS = 8  # of a call timed alone
MAX_GRAPHS = 8  # graphs of an executable, each for other addresses of inputs and outputs


class GpuCall(Call):
    """One recorded layer: `make(inputs, outputs)` gives its launches for these addresses; called again if the user passes another buffer."""

    def __init__(self, make: Any, inputs: Iterable[int], outputs: Iterable[int]) -> None:
        self._make = make
        self._at = {"input": list(inputs), "output": list(outputs)}
        self._launches: list[GpuWork] | None = None
        self.label = ""  # source node names, for the profiler's ranges

    @property
    def addresses(self) -> tuple[int, ...]:
        """The addresses of the inputs and outputs."""
        return (*self._at["input"], *self._at["output"])

    @property
    def launches(self) -> list[GpuWork]:
        """The launches, in order; none for a layer that only reinterprets its bytes."""
        if self._launches is None:
            self._launches = list(self._make(tuple(self._at["input"]), tuple(self._at["output"])))
        return self._launches

    def set_address(self, kind: str, index: int, address: int) -> None:
        """Replaces the address of operand `index` of `kind`; the executable must be refreshed before it runs again."""
        self._at[kind][index] = address
        self._launches = None

    def run(self) -> None:
        """Runs the launches now, on their own stream."""
        stream = Stream()
        for launch in self.launches:
            launch.run(stream)
        stream.synchronize()
        stream.close()


class GpuStream:
    """A recording stream: kernels of tactics add GpuCalls to it."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self.calls: list[GpuCall] = []

    def record(self, call: GpuCall) -> None:
        """Records a call."""
        self.calls.append(call)

    def finish(self) -> GpuExecutable:
        """The recorded calls as an executable."""
        return GpuExecutable(self.calls, self._device)


class GpuExecutable(Executable):
    """Calls in order, as one graph. `run()` returns when the results are complete; `enqueue()` at once, on its own or a given stream.

    After an address change it uses the graph that was captured for the new addresses before, if there is one, because an allocator returns the
    same few addresses to a caller again and again. Launches run one by one if the driver refuses to capture them (reason in `graph_refused`), if
    `use_graph` is False, and while NVTX ranges are on (nvtx.py), because a profiler does not see layers inside of a graph.
    """

    def __init__(self, calls: list[GpuCall], device: Device) -> None:
        self.calls, self._device = list(calls), device
        device.make_current()
        self.stream = Stream()
        self.use_graph = True
        self.graph_refused = ""
        self.graph: Graph | None = None
        self.graphs: OrderedDict[tuple[tuple[int, ...], ...], Graph] = OrderedDict()  # by the addresses of the calls in _moved
        self._moved: dict[int, GpuCall] = {}  # calls whose addresses have changed, by id
        self._events: tuple[Event, Event] | None = None
        self._single: dict[int, Graph] = {}  # one graph per call, for the profiler

    def refresh(self, calls: Sequence[Call]) -> None:
        """Selects the graph for the new addresses of `calls`; without one the next run captures it."""
        before = len(self._moved)
        for call in calls:
            assert isinstance(call, GpuCall)
            self._moved.setdefault(id(call), call)
        if len(self._moved) != before:  # the graphs' keys have no addresses of these calls
            self.discard_graphs()
        key = self._addresses()
        self.graph = self.graphs.get(key)
        if self.graph is not None:
            self.graphs.move_to_end(key)
        for graph in self._single.values():
            graph.close()
        self._single.clear()

    def _addresses(self) -> tuple[tuple[int, ...], ...]:
        return tuple([call.addresses for call in self._moved.values()])

    def discard_graphs(self) -> None:
        """The next run captures its graph again."""
        self.graph = None
        for graph in self.graphs.values():
            graph.close()
        self.graphs.clear()

    def prepare(self) -> None:
        """Captures the graph now instead of at the first run."""
        self._device.make_current()
        if self.graph is None and self.use_graph and not self.graph_refused:
            launches = [launch for call in self.calls for launch in call.launches]  # kernels must be loaded before a capture starts
            if any(launch.on_host for launch in launches):
                self.graph_refused = "a layer runs on the host"
                return
            try:
                self.graph = self.graphs[self._addresses()] = Graph(launches, self.stream)
            except LostContext:
                raise
            except BackendError as e:
                self.graph_refused = str(e)
            if len(self.graphs) > MAX_GRAPHS:
                self.graphs.popitem(last=False)[1].close()

    def enqueue(self, stream: Stream | None = None) -> None:
        """Starts all launches on a stream (default: the executable's own)."""
        self.prepare()
        target = stream or self.stream
        if nvtx.is_enabled():
            for call in self.calls:
                with nvtx.range_of(call.label):
                    for launch in call.launches:
                        launch.run(target)
        elif self.graph is not None and self.use_graph:
            self.graph.run(target)
        else:
            for call in self.calls:
                for launch in call.launches:
                    launch.run(target)

    def run(self) -> None:
        """Runs all launches and waits for them."""
        self.enqueue()
        self.stream.synchronize()

    def seconds(self, repeats: int) -> list[float]:
        """GPU seconds of each of `repeats` replays in sequence, without overlap."""
        self.prepare()
        start, end = self._clock()
        times = []
        for _ in range(repeats):
            start.record(self.stream)
            self.enqueue()
            end.record(self.stream)
            end.synchronize()
            times.append(end.since(start) / 1000)
        return times

    def seconds_in_row(self, others: Sequence[GpuExecutable]) -> list[float]:
        """GPU seconds of one run of this and each of the other executables, back to back on one stream, so that none waits for its launch by the
        host; an untimed run before them hides the launch time."""
        row = [self, *others]
        for executable in row:
            executable.prepare()
        events = [Event() for _ in range(len(row) + 1)]
        self.enqueue()
        events[0].record(self.stream)
        for executable, event in zip(row, events[1:], strict=True):
            executable.enqueue(self.stream)
            event.record(self.stream)
        events[-1].synchronize()
        times = [end.since(start) / 1000 for start, end in pairwise(events)]
        for event in events:
            event.close()
        return times

    def cold_seconds(self, before: GpuExecutable | None, other: DeviceBuffer) -> float:
        """GPU seconds of a replay with an L2 cache that holds only data left by a run of `before`: `other`, memory larger than the
        cache, is written before both."""
        self.prepare()
        start, end = self._clock()
        if before is not None:
            before.prepare()
        other.start_fill(self.stream)
        if before is not None:
            before.enqueue(self.stream)
        start.record(self.stream)
        self.enqueue()
        end.record(self.stream)
        end.synchronize()
        return end.since(start) / 1000

    def _clock(self) -> tuple[Event, Event]:
        if self._events is None:
            self._events = (Event(), Event())
        return self._events

    def run_timed(self) -> list[float]:
        """GPU seconds of each call, averaged over REPEATS consecutive launches, which overlap like adjacent layers in the network.

        With single launches, the time of a small kernel would be the launch overhead of the host.
        """
        self._device.make_current()
        start, end, times = Event(), Event(), []
        for call in self.calls:
            if not call.launches:
                times.append(0.0)
                continue
            if any(launch.on_host for launch in call.launches):
                start.record(self.stream)
                for launch in call.launches:
                    launch.run(self.stream)
                end.record(self.stream)
                end.synchronize()
                times.append(end.since(start) / 1000)
                continue
            if id(call) not in self._single:
                self._single[id(call)] = Graph(call.launches * REPEATS, self.stream)
            start.record(self.stream)
            self._single[id(call)].run(self.stream)
            end.record(self.stream)
            end.synchronize()
            times.append(end.since(start) / 1000 / REPEATS)
        start.close()
        end.close()
        return times

    def close(self) -> None:
        """Releases graph, events and stream."""
        self.discard_graphs()
        for graph in self._single.values():
            graph.close()
        self._single.clear()
        for event in self._events or ():
            event.close()
        self._events = None
        self.stream.close()

    def __del__(self) -> None:
        if self.stream.handle is not None:
            self.close()
