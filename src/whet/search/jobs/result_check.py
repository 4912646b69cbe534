"""Checks of result.json: a file that is damaged or was changed is treated as missing, so that its job is repeated."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

_FIGURES = {
    "metric": ("value",),
    "drop": ("value",),
    "latency": ("median_ms", "p99_ms", "mean_ms", "ratio"),
    "": ("throughput", "memory_bytes", "engine_bytes"),
}
_KINDS = {
    "candidate": dict, "kept": dict, "removed": list, "load": dict, "energy": dict, "steps": list, "branches": list, "notes": list,
    "precision": dict, "layers": list,
}  # fmt: skip
_ROW = re.compile(r"[0-9]{1,9}|[a-z0-9]{1,9}-b[0-9]{1,9}")  # names of job folders: a survivor's number, or a baseline's precision and batch


def is_result(result: Any) -> bool:
    """True for the result of a job as its process writes it: failed, stopped before its engine was built, measured, of the final comparison,
    or of a rebuild."""
    if not isinstance(result, Mapping) or not all(isinstance(result.get(k), str) for k in ("state", "role", "name")):
        return False
    if result["state"] == "failed":
        return isinstance(result.get("reason"), str) and isinstance(result.get("candidate"), Mapping)
    if result["state"] == "stopped":
        return _is_finite(result.get("flops_ratio")) and _has_numbers(result, {k: _FIGURES[k] for k in ("metric", "drop")}) and isinstance(
            result.get("reason"), str) and isinstance(result.get("candidate"), Mapping)  # fmt: skip
    if result["state"] != "done":
        return False
    if "differs" in result:
        return isinstance(result.get("model"), str)
    if result["role"] == "final":
        rows = result.get("rows")
        return isinstance(rows, list) and isinstance(result.get("load"), Mapping) and bool(rows) and all(map(_is_row, rows))
    return _has_figures(result) and all(isinstance(result.get(name), kind) for name, kind in _KINDS.items())


def _is_row(row: Any) -> bool:
    return isinstance(row, Mapping) and isinstance(row.get("folder"), str) and _ROW.fullmatch(row["folder"]) is not None and _has_figures(row)


def _has_figures(row: Mapping[str, Any]) -> bool:
    """True if a row has the finite numbers that engines are compared by."""
    return _has_numbers(row, _FIGURES)


def _has_numbers(row: Mapping[str, Any], figures: Mapping[str, tuple[str, ...]]) -> bool:
    for section, names in figures.items():
        values = row.get(section) if section else row
        if not isinstance(values, Mapping):
            return False
        for name in names:
            if not _is_finite(values.get(name)):
                return False
    return True


def _is_finite(v: Any) -> bool:
    return not isinstance(v, bool) and isinstance(v, int | float) and math.isfinite(v)
