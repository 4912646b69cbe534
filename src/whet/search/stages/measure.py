"""Measuring a search's engines: each against the original in interleaved rounds, with the external load at that time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from whet.backends import Backend
from whet.measure.compare import Ranking, compare, time_calls
from whet.measure.policy import TRIALS
from whet.measure.statistics import compute_confidence_interval
from whet.runtime import Context
from whet.search.stages.build_engine import Feeds, sample_feed

_CONTRADICTS = 1.3  # factor between a ratio and the ratio of the medians from which one of them is wrong
_ATTEMPTS = 3  # measurements, each twice as long, before a contradiction stays


def make_run(context: Context, data: Feeds) -> Callable[[], None]:
    """Binds inputs from `data` and the outputs; returns a function that runs the engine once."""
    for name, a in sample_feed(context, data).items():
        array = context.input_array(name)
        array[...] = a
        context.bind(name, array)
    for name in context.bindable_outputs:
        context.bind(name, context.output_array(name))
    context.execute()
    return context.execute


def time_engines(runs: Sequence[Callable[[], None]], seconds: float, backend: Backend) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Times of several engines, about `seconds` for each, and the external load meanwhile.

    A row: median_ms, p99_ms, mean_ms, runs, and against the first engine `ratio` (the median over rounds of the ratio of the rounds' medians;
    quartiles in `ratio_quartiles`, its 95 % interval in `ratio_interval`): external load that slows both engines cancels. A ratio that contradicts
    the row's own medians is measured again. If it still does, `contradiction` holds both, the larger one counts, and the load is `disturbed`.
    """
    for attempt in range(_ATTEMPTS):
        ranking = compare([time_calls(run) for run in runs], TRIALS.with_seconds(seconds * 2**attempt), watch=backend.watch)
        rows = [_make_row(ranking, i) for i in range(len(runs))]
        contradictions = [(row, implied) for row in rows if _contradicts(row["ratio"], implied := row["median_ms"] / rows[0]["median_ms"])]
        if not contradictions:
            break
    for row, implied in contradictions:
        row["contradiction"] = [row["ratio"], implied]
        row["ratio"] = max(row["ratio"], implied)
        row["ratio_interval"] = sorted(row["contradiction"])
    disturbed = ranking.disturbed or bool(contradictions)
    return rows, {"other_cpus": ranking.load.others, "disturbed": disturbed, "tries": ranking.attempts, **_describe_gpu(backend)}


def _contradicts(ratio: float, implied: float) -> bool:
    return not 1 / _CONTRADICTS <= ratio / implied <= _CONTRADICTS


def _make_row(ranking: Ranking, i: int) -> dict[str, Any]:
    ms = 1e3 * np.array(ranking.runs[i])
    ratios = ranking.ratios(i)
    return {
        "median_ms": float(np.median(ms)), "p99_ms": float(np.percentile(ms, 99)), "mean_ms": float(ms.mean()), "runs": len(ms),
        "ratio": float(np.median(ratios)), "ratio_quartiles": [float(np.percentile(ratios, q)) for q in (25, 75)],
        "ratio_interval": list(compute_confidence_interval(ratios)),
    }  # fmt: skip


def _describe_gpu(backend: Backend) -> dict[str, Any]:
    """Other processes on the GPU, its clock, power and temperature; nothing on a CPU."""
    state = backend.state()
    if not state:
        return {}
    return {"gpu_processes": list(state.get("other_processes", ())), **{k: state.get(k) for k in ("sm_clock", "power", "temperature")}}
