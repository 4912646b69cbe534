"""Measuring a search's engines: each against the original in interleaved rounds, with the external load at that time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from whet.backends import Backend
from whet.measure.compare import Ranking, compare, time_calls
from whet.measure.policy import TRIALS
from whet.runtime import Context
from whet.search.stages.build_engine import Feeds, sample_feed


def make_run(context: Context, data: Feeds) -> Callable[[], None]:
    """Binds inputs from `data` and the outputs; returns a function that runs the engine once."""
    for name, a in sample_feed(context, data).items():
        array = context.input_array(name)
        array[...] = a
        context.bind(name, array)
    for name in context.output_names:
        context.bind(name, context.output_array(name))
    context.execute()
    return context.execute


def time_engines(runs: Sequence[Callable[[], None]], seconds: float, backend: Backend) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Times of several engines, about `seconds` for each, and the external load meanwhile.

    A row: median_ms, p99_ms, mean_ms, runs, and against the first engine `ratio` (the median over rounds of the ratio of the rounds' medians,
    quartiles in `ratio_quartiles`): external load that slows both engines cancels.
    """
    ranking = compare([time_calls(run) for run in runs], TRIALS.with_seconds(seconds), watch=backend.watch)
    load = {"other_cpus": ranking.load.others, "disturbed": ranking.disturbed, "tries": ranking.attempts, **_gpu(backend)}
    return [_row(ranking, i) for i in range(len(runs))], load


def _row(ranking: Ranking, i: int) -> dict[str, Any]:
    ms = 1e3 * np.array(ranking.runs[i])
    ratios = ranking.ratios(i)
    return {
        "median_ms": float(np.median(ms)), "p99_ms": float(np.percentile(ms, 99)), "mean_ms": float(ms.mean()), "runs": len(ms),
        "ratio": float(np.median(ratios)), "ratio_quartiles": [float(np.percentile(ratios, q)) for q in (25, 75)],
    }  # fmt: skip


def _gpu(backend: Backend) -> dict[str, Any]:
    """Other processes on the GPU, its clock, power and temperature; nothing on a CPU."""
    state = backend.state()
    if not state:
        return {}
    return {"gpu_processes": list(state.get("other_processes", ())), **{k: state.get(k) for k in ("sm_clock", "power", "temperature")}}
