"""Timing inference the way trtexec does: warm-up, at least N iterations and S seconds, with separate times of the copies in and out."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

import numpy as np


@dataclass(frozen=True)
class Trace:
    """One query; milliseconds since the start of the run."""

    startEnqMs: float
    endEnqMs: float
    startH2dMs: float
    endH2dMs: float
    startComputeMs: float
    endComputeMs: float
    startD2hMs: float
    endD2hMs: float

    @property
    def h2d(self) -> float:
        return self.endH2dMs - self.startH2dMs

    @property
    def compute(self) -> float:
        return self.endComputeMs - self.startComputeMs

    @property
    def d2h(self) -> float:
        return self.endD2hMs - self.startD2hMs

    @property
    def enqueue(self) -> float:
        return self.endEnqMs - self.startEnqMs

    @property
    def latency(self) -> float:
        return self.h2d + self.compute + self.d2h

    def to_json(self) -> dict[str, float]:
        """The record of --exportTimes."""
        return {**asdict(self), "h2dMs": self.h2d, "computeMs": self.compute, "d2hMs": self.d2h, "latencyMs": self.latency}


@dataclass(frozen=True)
class Measured:
    """The traces of all counted queries, their wall time in seconds, and the number of warm-up queries."""

    traces: list[Trace]
    wall: float
    warmup_queries: int
    streams: int


def measure(
    contexts: list,
    feeds: list[dict[str, np.ndarray]],
    *,
    warmup_ms: float = 200,
    duration_s: float = 3,
    iterations: int = 10,
    transfers: bool = True,
    sleep_ms: float = 0,
    idle_ms: float = 0,
    tick: Callable[[float], None] | None = None,
) -> Measured:
    """Runs each context in its own thread (a single context in this one). `tick` periodically gets the completed share of the duration."""
    start = time.perf_counter()
    bound = [_bind(c, f) for c, f in zip(contexts, feeds, strict=True)]
    traces: list[list[Trace]] = [[] for _ in contexts]
    warm = [0] * len(contexts)
    begin = [0.0]
    failures: list[BaseException] = []

    def run_loop(k: int) -> None:
        context, (inputs, outputs, sources, results) = contexts[k], bound[k]

        def query() -> Trace:
            t0 = time.perf_counter()
            if transfers:
                for name, dst in inputs.items():
                    np.copyto(dst, sources[name])
            t1 = time.perf_counter()
            if sleep_ms:
                time.sleep(sleep_ms / 1000)
                t1 = time.perf_counter()
            context.execute()
            t2 = time.perf_counter()
            if transfers:
                for name, src in outputs.items():
                    np.copyto(results[name], src)
            t3 = time.perf_counter()
            a, b, c, d = ((t - start) * 1000 for t in (t0, t1, t2, t3))
            return Trace(b, c, a if transfers else b, b, b, c, c, d if transfers else c)

        try:
            limit = time.perf_counter() + warmup_ms / 1000
            while time.perf_counter() < limit:
                query()
                warm[k] += 1
            if k == 0:
                begin[0] = time.perf_counter()
            mine = time.perf_counter()
            while True:
                traces[k].append(query())
                if idle_ms:
                    time.sleep(idle_ms / 1000)
                spent = time.perf_counter() - mine
                if k == 0 and tick is not None and len(traces[k]) % 16 == 0:
                    tick(min(spent / duration_s if duration_s > 0 else 1.0, 1.0))
                if len(traces[k]) >= iterations and (0 <= duration_s <= spent):
                    break
        except BaseException as e:  # noqa: BLE001 - handed to the caller's thread below
            failures.append(e)

    if len(contexts) == 1:
        run_loop(0)
    else:
        threads = [threading.Thread(target=run_loop, args=(k,), name=f"stream-{k}") for k in range(len(contexts))]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
    if failures:
        raise failures[0]
    ordered = sorted((t for ts in traces for t in ts), key=lambda t: t.startComputeMs)
    return Measured(ordered, time.perf_counter() - begin[0], sum(warm), len(contexts))


def _bind(context, feed: dict[str, np.ndarray]):
    """Binds arrays to the context; returns them with the host arrays that are copied to and from."""
    for name, a in feed.items():
        context.set_input_shape(name, a.shape)
    inputs = {name: context.input_array(name) for name in feed}
    for name, a in inputs.items():
        np.copyto(a, feed[name])
        context.bind(name, a)
    outputs = {name: context.output_array(name) for name in context.bindable_outputs}
    for name, a in outputs.items():
        context.bind(name, a)
    return inputs, outputs, feed, {n: np.empty_like(a) for n, a in outputs.items()}


def compute_percentile(values: list[float], p: float) -> float:
    """trtexec's percentile: index max(n - 1 - int((1 - p/100) * n), 0) of the sorted list."""
    ordered = sorted(values)
    n = len(ordered)
    return ordered[max(n - 1 - int(round((1 - p / 100) * n, 9)), 0)]
