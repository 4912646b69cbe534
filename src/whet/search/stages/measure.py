"""What is measured of engines: times in turns, so that a busy moment hurts all alike, with what else ran meanwhile."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any

import numpy as np

from whet.backends import Backend
from whet.runtime import Context
from whet.search.stages.build_engine import Feeds, sample_feed

_ROUNDS = (12, 400)  # of turns
_EACH_MS = 4.0  # each turn runs about so long, so that caches and clocks are an engine's own
_TRIES = 3  # a disturbed measurement is repeated; the least disturbed one counts


def ready(context: Context, data: Feeds) -> Callable[[], None]:
    """Binds real inputs and the outputs; calling the result runs the engine once."""
    for name, a in sample_feed(context, data).items():
        array = context.input_array(name)
        array[...] = a
        context.bind(name, array)
    for name in context.output_names:
        context.bind(name, context.output_array(name))
    context.execute()
    return context.execute


def in_turns(runs: Sequence[Callable[[], None]], seconds: float, backend: Backend) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Times of several engines, `seconds` for each, and the load that others made meanwhile.

    A row: median_ms, p99_ms, mean_ms, runs, and against the first engine `ratio` (the median over rounds of the ratio of the
    rounds' medians, quartiles in `ratio_quartiles`): what a busy neighbour slows, it slows in both.
    """
    best: tuple[float, list[dict[str, Any]], dict[str, Any]] | None = None
    for attempt in range(_TRIES):
        with backend.watch() as watched:
            rows = _once(runs, seconds)
        others = watched.others
        load = {"other_cpus": others, "disturbed": watched.disturbed, "tries": attempt + 1, **_gpu(backend)}
        if best is None or (others or 0.0) < best[0]:
            best = (others or 0.0, rows, load)
        if not load["disturbed"]:
            break
    assert best is not None
    best[2]["tries"] = attempt + 1
    return best[1], best[2]


def _once(runs: Sequence[Callable[[], None]], seconds: float) -> list[dict[str, Any]]:
    times: list[list[list[float]]] = [[] for _ in runs]
    each = []
    for run in runs:
        for _ in range(3):
            run()
        start = perf_counter()
        run()
        each.append(int(np.clip(_EACH_MS / 1e3 / max(perf_counter() - start, 1e-7), 1, 50)))
    collecting = gc.isenabled()
    gc.disable()
    try:
        start, n = perf_counter(), 0
        while n < _ROUNDS[0] or (n < _ROUNDS[1] and perf_counter() - start < seconds * len(runs)):
            order = range(len(runs)) if n % 2 == 0 else range(len(runs) - 1, -1, -1)
            for i in order:
                turn = []
                for _ in range(each[i] + 1):
                    before = perf_counter()
                    runs[i]()
                    turn.append(1e3 * (perf_counter() - before))
                times[i].append(turn[1:])  # the first run after another engine's finds that one's caches
            n += 1
    finally:
        if collecting:
            gc.enable()
    medians = [np.array([np.median(t) for t in turns]) for turns in times]
    rows = []
    for turns, middle in zip(times, medians, strict=True):
        flat = np.concatenate([np.asarray(t) for t in turns])
        ratios = middle / medians[0]
        rows.append({
            "median_ms": float(np.median(flat)), "p99_ms": float(np.percentile(flat, 99)), "mean_ms": float(flat.mean()), "runs": len(flat),
            "ratio": float(np.median(ratios)), "ratio_quartiles": [float(np.percentile(ratios, q)) for q in (25, 75)],
        })  # fmt: skip
    return rows


def _gpu(backend: Backend) -> dict[str, Any]:
    """Other processes on the GPU, its clock, power and temperature; nothing on a CPU."""
    state = backend.state()
    if not state:
        return {}
    return {"gpu_processes": list(state.get("other_processes", ())), **{k: state.get(k) for k in ("sm_clock", "power", "temperature")}}
