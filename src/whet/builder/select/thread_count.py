"""Selecting the thread count: whole engines are built for several counts and timed interleaved.

Small networks may run faster on fewer threads than there are. Each run is timed after a pause in which the pool's threads fall asleep, as between
requests: waking them takes longer than a small layer, and libgomp's may be woken on the CPU of the calling thread, where they stay for many runs
(docs/design/threads.md). Of counts that do not differ the smallest is kept. An engine has one count, since oneDNN's primitives are created for one.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from statistics import median

from whet.backends import get_backend, get_capabilities
from whet.builder.config import AUTO_THREADS, BuildConfig
from whet.builder.select.plan_history import EARLIER, compare_plans
from whet.engine.plan import EnginePlan
from whet.engine.probe import probe_inputs, probe_shapes
from whet.engine.report import ThreadCountTime
from whet.measure.compare import Ranking, Timeable, compare
from whet.measure.policy import THREAD_COUNTS
from whet.runtime import bind

_PAUSE_S = 0.002  # before a sample: longer than threads spin
_RUNS, _SHORT_S = 5, 1e-3  # the sample of a run shorter than that is the median of so many
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


def select_fastest_plan(plans: Sequence[EnginePlan], config: BuildConfig) -> EnginePlan:
    """The fastest plan, or that of fewest threads of those that do not differ. It gets a report of the counts and their times."""
    if len(plans) == 1:
        return plans[0]
    backends = [get_backend(p.backend, threads=p.threads) for p in plans]

    def measure() -> Ranking:
        bounds = []
        for plan, backend in zip(plans, backends, strict=True):
            backend.activate()
            bound = bind(plan, backend)
            bound.feed(probe_inputs(plan.network, config.seed, probe_shapes(plan)))
            bounds.append(bound)
        return compare([partial(measure_after_pause, b) for b in bounds], THREAD_COUNTS, watch=backends[0].watch)

    order = sorted(range(len(plans)), key=lambda k: plans[k].threads)
    times = compare_plans(plans, order, "the thread count", config, backends[0], measure)
    rows = [ThreadCountTime(p.threads, times.seconds[k] * 1e3, times.spreads[k] * 1e3) for k, p in enumerate(plans)]
    backends[times.selected].activate()
    plan = plans[times.selected]
    plan.report.threads = rows
    said = ", ".join(f"{r.threads}: {r.ms:.4g} ms" for r in rows)
    load = times.load
    busy = f"; {load.who} took {load.others:.1f} CPUs meanwhile, so this may be off" if load.disturbed else ""
    texts = plan.report.notes if busy else plan.report.info
    texts.append(f"threads were chosen by time ({said}{EARLIER if times.recalled else ''}); the engine takes {plan.threads}{busy}")
    return plan


def measure_after_pause(bound: Timeable) -> float:
    """Seconds of one run after the pool's threads have fallen asleep and were woken again."""
    time.sleep(_PAUSE_S)
    first = bound.seconds(1)
    return first[0] if first[0] >= _SHORT_S else median(first + bound.seconds(_RUNS - 1))
