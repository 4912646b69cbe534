"""Selecting the thread count: whole engines are built for several counts and timed interleaved.

Small networks may run faster on fewer threads than there are, since every parallel region waits for its slowest thread. An engine has one
count: oneDNN's primitives are created for one count, and libgomp rebuilds its thread pool between regions of different counts, which takes
longer than a small layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from whet.backends import get_backend, get_capabilities
from whet.builder.config import AUTO_THREADS, BuildConfig
from whet.engine.plan import EnginePlan
from whet.engine.probe import probe_inputs, probe_shapes
from whet.engine.report import ThreadCountTime
from whet.measure.compare import compare, measure_run
from whet.measure.policy import THREAD_COUNTS
from whet.runtime import bind

_LEVEL = 4  # the least builderOptimizationLevel that times several counts


def list_thread_counts(config: BuildConfig, locked: int | None = None) -> list[int]:
    """Thread counts to build for, usually the fastest first: all usable, half of them, one. Under a lock only the locked count."""
    if not get_capabilities(config.backend).workers or config.threads > 0:
        return [config.threads]
    if locked is not None:
        return [locked if config.threads == AUTO_THREADS or config.optimization_level >= _LEVEL else config.threads]
    if config.threads != AUTO_THREADS and config.optimization_level < _LEVEL:
        return [0]
    usable = get_backend(config.backend).threads
    return list(dict.fromkeys((usable, max(usable // 2, 1), 1)))


def select_fastest_plan(plans: Sequence[EnginePlan], seed: int = 0) -> EnginePlan:
    """The fastest plan, or the first of those that do not differ. It gets a report of the counts and their times."""
    if len(plans) == 1:
        return plans[0]
    backends = [get_backend(p.backend, threads=p.threads) for p in plans]
    bounds = []
    for plan, backend in zip(plans, backends, strict=True):
        backend.activate()
        bound = bind(plan, backend)
        bound.feed(probe_inputs(plan.network, seed, probe_shapes(plan)))
        bounds.append(bound)
    ranking = compare([partial(measure_run, b) for b in bounds], THREAD_COUNTS, watch=backends[0].watch)
    kept = ranking.select(range(len(plans)))
    rows = [ThreadCountTime(p.threads, ranking.seconds(k) * 1e3, ranking.spread(k) * 1e3) for k, p in enumerate(plans)]
    load = ranking.load
    backends[kept].activate()
    plan = plans[kept]
    plan.report.threads = rows
    said = ", ".join(f"{r.threads}: {r.ms:.4g} ms" for r in rows)
    busy = f"; {load.who} took {load.others:.1f} CPUs meanwhile, so this may be off" if load.disturbed else ""
    texts = plan.report.notes if busy else plan.report.info
    texts.append(f"threads were chosen by time ({said}); the engine takes {plan.threads}{busy}")
    return plan
