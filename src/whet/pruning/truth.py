"""The truth beside a prediction: engines of the network before and after, built the same way and timed in turns."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import median

from whet.builder import build
from whet.builder.config import BuildConfig
from whet.builder.profiles import OPT, resolve_profiles
from whet.network import Network
from whet.runtime import Runtime

Progress = Callable[[int, int, str], None]


def measured_ms(nets: Sequence[Network], config: BuildConfig, *, seconds: float = 1.0, progress: Progress | None = None) -> list[float]:
    """Median milliseconds of one run of each network's engine at the opt shapes, its input and output buffers bound.

    All engines are built first and then run in turns for about `seconds` each, so that a busy moment hurts all alike. Verification is
    left to the build that makes the engine which is kept. Raises BuildError and its kinds.
    """
    plans = []
    for n, net in enumerate(nets):
        if progress is not None:
            progress(n, len(nets), "building an engine")
        plans.append(build(net, replace(config, verify=False)))
    runtime = Runtime(config.backend if config.backend != "cpu" else None, threads=config.threads)
    profiles, _ = resolve_profiles(nets[0], config)
    engines = [runtime.load(p) for p in plans]
    contexts = [e.create_context() for e in engines]
    try:
        for c in contexts:
            for name, shapes in profiles[0].shapes.items():
                c.set_input_shape(name, shapes[OPT])
            for name in c.input_names:
                a = c.input_array(name)
                a[...] = 0
                c.bind(name, a)
            for name in c.output_names:
                c.bind(name, c.output_array(name))
        return _in_turns(contexts, seconds)
    finally:
        for c in contexts:
            c.close()
        for e in engines:
            e.close()


def _in_turns(contexts: Sequence, seconds: float) -> list[float]:
    for c in contexts:
        c.execute()
    start = time.perf_counter()
    for c in contexts:
        c.execute()
    once = max((time.perf_counter() - start) / len(contexts), 1e-6)
    each, rounds = max(1, min(20, int(0.01 / once))), 3
    rounds = max(rounds, int(seconds / (once * each)))
    times: list[list[float]] = [[] for _ in contexts]
    for _ in range(rounds):
        for c, found in zip(contexts, times, strict=True):
            for _ in range(each):
                start = time.perf_counter()
                c.execute()
                found.append((time.perf_counter() - start) * 1e3)
    return [median(t) for t in times]
