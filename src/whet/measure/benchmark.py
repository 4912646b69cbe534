"""The latency and throughput of an engine, for `Engine.benchmark`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from statistics import fmean, median
from typing import TYPE_CHECKING, Any

import numpy as np

from whet.errors import ShapeError, UsageError
from whet.measure.queries import Measured, compute_percentile, measure
from whet.measure.statistics import compute_confidence_interval
from whet.runtime.arrays import as_array

if TYPE_CHECKING:
    from whet.measure.tensorrt_engine import ComparedEngine
    from whet.runtime.engine import Engine

_WARMUP = 0.2  # of the measured seconds
_FEWEST = 10  # queries


@dataclass(frozen=True)
class Benchmark:
    """Times of one engine at one set of shapes, in milliseconds. `queries` were timed in `seconds`; `samples_per_s` counts batch items.

    `interval_ms` is the 95 % confidence interval of the median latency. Latency includes the copies to and from the engine's memory, which
    are `copies_ms` of the median query.
    """

    queries: int
    seconds: float
    batch: int
    latency_ms: float
    interval_ms: tuple[float, float]
    mean_ms: float
    p90_ms: float
    p99_ms: float
    compute_ms: float
    copies_ms: float
    queries_per_s: float
    samples_per_s: float

    def __str__(self) -> str:
        low, high = self.interval_ms
        return (
            f"latency {self.latency_ms:.4g} ms (median; 95 % interval {low:.4g} to {high:.4g}, p99 {self.p99_ms:.4g}), "
            f"{self.queries_per_s:.4g} queries/s, {self.samples_per_s:.4g} samples/s (batch {self.batch}, {self.queries} queries)"
        )

    def to_dict(self) -> dict[str, Any]:
        """The fields as JSON data."""
        return asdict(self)


def benchmark(
    engine: Engine,
    inputs: Mapping[str, Any] | None = None,
    *,
    shapes: Mapping[str, tuple[int, ...]] | None = None,
    seconds: float = 1.0,
) -> Benchmark:
    """Times `engine` on `inputs` by name, or on seeded random values of `shapes`. Raises ShapeError, UsageError for both or for no time."""
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not seconds > 0:
        raise UsageError(f"seconds: {seconds!r} is not a number above 0")
    if inputs is not None and shapes is not None:
        raise UsageError("shapes: the inputs have shapes already; give one of inputs and shapes")
    if inputs is None:
        with engine.create_context() as context:
            feed = draw_inputs(engine, context.input_shapes(shapes))
    else:
        feed = {n: np.ascontiguousarray(as_array(n, a, engine.dtype(n))) for n, a in inputs.items()}
    limits = {"warmup_ms": 1e3 * _WARMUP * seconds, "duration_s": seconds, "iterations": _FEWEST}
    return summarize(_time_runs(engine, feed, limits), next((a.shape[0] for a in feed.values() if a.ndim), 1))


def _time_runs(engine: Engine, feed: dict[str, np.ndarray], limits: dict[str, Any]) -> Measured:
    if engine.backend.capabilities.user_streams:
        from whet.measure.queries_gpu import measure_gpu

        return measure_gpu(engine, None, feed, **limits)
    with engine.create_context() as context:
        return measure([context], [feed], **limits)


def summarize(measured: Measured, batch: int) -> Benchmark:
    """The statistics of timed queries of `batch` samples each."""
    latencies = [t.latency for t in measured.traces]
    low, high = compute_confidence_interval(latencies)
    per_second = len(latencies) / measured.wall
    return Benchmark(
        queries=len(latencies), seconds=measured.wall, batch=batch, latency_ms=median(latencies), interval_ms=(low, high),
        mean_ms=fmean(latencies), p90_ms=compute_percentile(latencies, 90), p99_ms=compute_percentile(latencies, 99),
        compute_ms=median(t.compute for t in measured.traces), copies_ms=median(t.h2d + t.d2h for t in measured.traces),
        queries_per_s=per_second, samples_per_s=per_second * batch,
    )  # fmt: skip


def draw_inputs(engine: ComparedEngine, shapes: Mapping[str, tuple[int, ...]], seed: int = 0) -> dict[str, np.ndarray]:
    """Seeded inputs of `shapes` in the engine's types: normally distributed floats, zeros and ones for the other types.

    Raises ShapeError for an unknown name.
    """
    rng = np.random.default_rng(seed)
    arrays = {}
    for name, shape in shapes.items():
        if name not in engine.inputs:
            raise ShapeError(f"the engine has no input '{name}'; it has {', '.join(engine.inputs)}")
        dtype = engine.dtype(name)
        arrays[name] = rng.standard_normal(shape).astype(dtype.numpy) if dtype.is_float else rng.integers(0, 2, shape).astype(dtype.numpy)
    return arrays
