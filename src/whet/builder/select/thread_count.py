"""How many threads: whole engines built for several counts, timed against each other in turns.

Small networks may run faster on fewer threads than there are: every parallel region waits for its slowest thread. The count belongs to
the whole engine: oneDNN's primitives are made for one count, and libgomp tears its pool down and builds it up when regions of different
counts follow each other, which costs more than a small layer takes.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from whet.backends import capabilities_of, get_backend
from whet.builder.config import AUTO_THREADS, BuildConfig
from whet.engine.plan import EnginePlan
from whet.engine.probe import probe_inputs, probe_shapes
from whet.engine.report import ThreadCountTime
from whet.measure.compare import compare
from whet.measure.policy import THREAD_COUNTS
from whet.runtime import bind

_LEVEL = 4  # from here on "all usable threads" is a question, not an answer


def thread_counts(config: BuildConfig, locked: int | None = None) -> list[int]:
    """Counts worth building for, what is usually fastest first: all usable, half of them, one. A lock's count is the only one."""
    if not capabilities_of(config.backend).workers or config.threads > 0:
        return [config.threads]
    if locked is not None:
        return [locked if config.threads == AUTO_THREADS or config.optimization_level >= _LEVEL else config.threads]
    if config.threads != AUTO_THREADS and config.optimization_level < _LEVEL:
        return [0]
    usable = get_backend(config.backend).threads
    return list(dict.fromkeys((usable, max(usable // 2, 1), 1)))


def fastest(plans: Sequence[EnginePlan], seed: int = 0) -> EnginePlan:
    """The plan that runs fastest, the first of those that do not differ. All get a report of the counts and their times."""
    backends = [get_backend(p.backend, threads=p.threads) for p in plans]
    bounds = []
    for plan, backend in zip(plans, backends, strict=True):
        backend.activate()
        bound = bind(plan, backend)
        bound.feed(probe_inputs(plan.network, seed, probe_shapes(plan)))
        bounds.append(bound)
    ranking = compare([partial(_run_once, b) for b in bounds], THREAD_COUNTS, watch=backends[0].watch)
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


def _run_once(bound: Any) -> float:
    return float(bound.seconds(1)[0])
