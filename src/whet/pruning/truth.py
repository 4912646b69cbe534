"""Measured latency, to check predictions: builds engines of the networks before and after pruning with one configuration and compares them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import median

from whet.builder.batching.profiles import OPT, resolve_profiles
from whet.builder.build import build
from whet.builder.config import BuildConfig
from whet.builder.precision.calibration import Calibration, is_explicit
from whet.builder.precision.int8 import build_int8
from whet.engine.plan import EnginePlan
from whet.measure.benchmark import draw_inputs
from whet.measure.compare import compare, measure_run
from whet.measure.policy import PRUNED
from whet.measure.statistics import compute_confidence_interval
from whet.network import Network
from whet.runtime import Runtime

Progress = Callable[[int, int, str], None]


@dataclass(frozen=True)
class Measured:
    """Measurements of an engine: ms per run, peak bytes (arena, scratch, weights), bytes of its packed weights, and its plan. `ratio` is its time
    over that of the first engine, with a 95 % confidence interval; external load, which slows both, cancels. `interval_ms` is that of `ms`."""

    ms: float
    peak_bytes: int
    weight_bytes: int
    plan: EnginePlan
    ratio: float = 1.0
    ratio_interval: tuple[float, float] = (1.0, 1.0)
    interval_ms: tuple[float, float] = (0.0, 0.0)


def measure_latencies(nets: Sequence[Network], config: BuildConfig, *, seconds: float = 1.0, progress: Progress | None = None) -> list[float]:
    """The latencies in ms of `measure_engines`."""
    return [m.ms for m in measure_engines(nets, config, seconds=seconds, progress=progress)]


def measure_engines(nets: Sequence[Network], config: BuildConfig, *, seconds: float = 1.0, progress: Progress | None = None) -> list[Measured]:
    """Builds an engine of each network and times its computation at the opt shapes on random inputs, by the device's clock: on a GPU without
    the transfer of inputs and outputs. Weights that are 2:4 may run on sparse kernels, unless `config.sparsity` overwrites all weights anyway.

    All engines are built first and timed interleaved for about `seconds` each, so that external load affects all alike. They are not
    verified: the build of the final engine does that. Raises BuildError and its subclasses.
    """
    config = replace(config, verify=False, sparsity="enable" if config.sparsity == "disable" else config.sparsity)
    plans = []
    for n, net in enumerate(nets):
        if progress is not None:
            progress(n, len(nets), "building an engine")
        plans.append(_plan(net, config))
    runtime = Runtime(config.backend, threads=config.threads)
    engines = [runtime.load(p) for p in plans]
    contexts = [e.create_context() for e in engines]
    try:
        bounds = []
        for net, engine, c in zip(nets, engines, contexts, strict=True):
            shapes = {name: shape[OPT] for name, shape in resolve_profiles(net, config)[0][0].shapes.items()}
            for name, shape in shapes.items():
                c.set_input_shape(name, shape)
            bound = c.launches()
            bound.feed(draw_inputs(engine, c.input_shapes(shapes)))
            bounds.append(bound)
        ranking = compare([partial(measure_run, b) for b in bounds], PRUNED.with_seconds(seconds))
        first = 1e3 * ranking.seconds(0)
        measured = []
        for i, (engine, c, plan) in enumerate(zip(engines, contexts, plans, strict=True)):
            ratios, memory = ranking.ratios(i), engine.memory(c)
            ratio, interval = (median(ratios), compute_confidence_interval(ratios)) if i else (1.0, (1.0, 1.0))
            low, high = (first * x for x in interval) if i else (1e3 * x for x in ranking.interval(0))
            measured.append(Measured(first * ratio, memory.peak, memory.packed or memory.weights, plan, ratio, interval, (low, high)))
        return measured
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
