"""The JSON of trtexec's exports: profile, times, outputs."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from whet.engine import LayerTimes

_TIMES = ("startEnqMs", "endEnqMs", "startH2dMs", "endH2dMs", "startComputeMs", "endComputeMs", "startD2hMs", "endD2hMs")


def profile_records(rows: Sequence[LayerTimes]) -> list[dict[str, Any]]:
    """`--exportProfile`: the count of iterations, then name, timeMs (the sum), averageMs, medianMs and percentage of each layer."""
    total = sum(r.total_ms for r in rows)
    count = len(rows[0].times_ms) if rows else 0
    return [
        {"count": count},
        *(
            {
                "name": r.name,
                "timeMs": r.total_ms,
                "averageMs": r.average_ms,
                "medianMs": r.median_ms,
                "percentage": 100 * r.total_ms / total if total else 0.0,
            }
            for r in rows
        ),
    ]


def times_records(rows: Iterable[Mapping[str, float]]) -> list[dict[str, float]]:
    """`--exportTimes`: each query's eight time stamps in ms since the start, and the four durations between them."""
    records = []
    for r in rows:
        row = {k: float(r[k]) for k in _TIMES}
        h2d, compute, d2h = (row[f"end{x}Ms"] - row[f"start{x}Ms"] for x in ("H2d", "Compute", "D2h"))
        records.append({**row, "h2dMs": h2d, "computeMs": compute, "d2hMs": d2h, "latencyMs": h2d + compute + d2h})
    return records


def output_records(outputs: Mapping[str, np.ndarray]) -> list[dict[str, Any]]:
    """`--exportOutput`: name, dimensions as text with x, values flat in logical order (NaN and infinities as null, since JSON lacks them)."""
    return [
        {"name": name, "dimensions": "x".join(map(str, np.shape(a))) or "scalar", "values": [_to_json_number(v) for v in np.asarray(a).reshape(-1)]}
        for name, a in outputs.items()
    ]


def _to_json_number(v: Any) -> Any:
    if isinstance(v, bool | np.bool_):
        return int(v)
    if isinstance(v, int | np.integer):
        return int(v)
    return float(v) if math.isfinite(v) else None
