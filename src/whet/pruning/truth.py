"""Measured latency, to check predictions: builds engines of the networks before and after pruning with one configuration and compares them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import median

from whet.builder.batching.profiles import OPT, resolve_profiles
from whet.builder.build import build
from whet.builder.config import BuildConfig
from whet.builder.precision.calibration import Calibration, is_explicit
from whet.builder.precision.int8 import build_int8
from whet.engine.plan import EnginePlan
from whet.measure.compare import compare, time_calls
from whet.measure.policy import PRUNED
from whet.network import Network
from whet.runtime import Runtime

Progress = Callable[[int, int, str], None]


@dataclass(frozen=True)
class Measured:
    """Measurements of an engine: median ms per run, peak bytes (arena, scratch, weights), bytes of its packed weights, and its plan."""

    ms: float
    peak_bytes: int
    weight_bytes: int
    plan: EnginePlan


def measure_latencies(nets: Sequence[Network], config: BuildConfig, *, seconds: float = 1.0, progress: Progress | None = None) -> list[float]:
    """The latencies in ms of `measure_engines`."""
    return [m.ms for m in measure_engines(nets, config, seconds=seconds, progress=progress)]


def measure_engines(nets: Sequence[Network], config: BuildConfig, *, seconds: float = 1.0, progress: Progress | None = None) -> list[Measured]:
    """Builds an engine of each network and times it at the opt shapes with bound input and output buffers.

    All engines are built first and timed interleaved for about `seconds` each, so that external load affects all alike. They are not
    verified: the build of the final engine does that. Raises BuildError and its subclasses.
    """
    plans = []
    for n, net in enumerate(nets):
        if progress is not None:
            progress(n, len(nets), "building an engine")
        plans.append(_plan(net, replace(config, verify=False)))
    runtime = Runtime(config.backend, threads=config.threads)
    engines = [runtime.load(p) for p in plans]
    contexts = [e.create_context() for e in engines]
    try:
        for net, c in zip(nets, contexts, strict=True):
            for name, shapes in resolve_profiles(net, config)[0][0].shapes.items():
                c.set_input_shape(name, shapes[OPT])
            for name in c.input_names:
                a = c.input_array(name)
                a[...] = 0
                c.bind(name, a)
            for name in c.output_names:
                c.bind(name, c.output_array(name))
        times = _compare(contexts, seconds)
        used = [e.memory(c) for e, c in zip(engines, contexts, strict=True)]
        return [Measured(ms, m.peak, m.packed or m.weights, plan) for ms, m, plan in zip(times, used, plans, strict=True)]
    finally:
        for c in contexts:
            c.close()
        for e in engines:
            e.close()


def _plan(net: Network, config: BuildConfig) -> EnginePlan:
    """The engine; in INT8 with placeholder ranges (they do not affect the latency), unless the network has Q/DQ layers."""
    if "int8" not in config.precisions or is_explicit(net):
        return build(net, config)
    return build_int8(net, config, Calibration())


def _compare(contexts: Sequence, seconds: float) -> list[float]:
    """Latencies in ms: the median of the first; for the others this times the median of their per-round ratios to it, which external load
    affects less than their own medians."""
    ranking = compare([time_calls(c.execute) for c in contexts], PRUNED.with_seconds(seconds))
    first = 1e3 * ranking.seconds(0)
    return [first * median(ranking.ratios(i)) for i in range(len(contexts))]
