"""A lock of an engine whose precisions were found by calibration or a budget: it holds what was found, and nothing is found again.

Such a build ends in a plain one of another network (Q/DQ inserted) or with other options (layers kept in FP32). The plan's report says
under "asked" which precisions the user asked for, under "quantized" the ranges and the layers left in floating point; the lock keeps both.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from whet.builder.config import BuildConfig
from whet.builder.lock.lock import read_lock
from whet.engine.plan import EnginePlan
from whet.errors import CalibrationError, LockError, NetworkError
from whet.precision import Ranges
from whet.precision.ranges import Range

_FOUND = ("precisions", "precision_constraints", "layer_precisions", "layer_output_types")


def note_found(plan: EnginePlan, asked: BuildConfig) -> EnginePlan:
    """Puts into the report what the user asked for."""
    plan.report["asked"] = {k: _lists(getattr(asked, k)) for k in _FOUND}
    return plan


def recipe(ranges: Ranges, float_layers: frozenset[str], tables: bool = False) -> dict[str, Any]:
    """Ranges, the layers left in floating point and whether activations are looked up, as JSON data."""
    return {
        "tables": tables,
        "float_layers": sorted(float_layers),
        "ranges": {n: [float(r.low), float(r.high)] for n, r in sorted(ranges.tensors.items())},
        "scalings": {n: [float(v) for v in a] for n, a in sorted(ranges.scalings.items())},
        "corrections": {n: [float(v) for v in a] for n, a in sorted(ranges.corrections.items())},
        "float_sums": sorted(ranges.float_sums),
    }


def locked_again(
    config: BuildConfig, plain: Callable[[BuildConfig], EnginePlan], integers: Callable[[Ranges, frozenset[str], bool], EnginePlan] | None = None
) -> EnginePlan:
    """The engine of `config.lock`: by `integers` where the lock holds ranges, else by `plain` with the options that were found then.

    Raises LockError for another lock, or other precisions than it was asked for.
    """
    assert config.lock, "asked for without a lock"
    lock = read_lock(config.lock)
    asked = lock.get("asked")
    if asked is None:
        return plain(config)
    now = {k: _lists(getattr(config, k)) for k in _FOUND}
    moved = [f"the option {k}: was {asked.get(k)}, is {now[k]}" for k in _FOUND if asked.get(k) != now[k]] if isinstance(asked, dict) else ["asked"]
    if moved:
        raise LockError("the lock cannot be kept, because something moved:\n  " + "\n  ".join(moved))
    try:
        if lock.get("quantized") is None:
            found = {k: _tuples(lock["options"][k]) for k in _FOUND}
            resolved = dataclasses.replace(config, **found)
        else:
            ranges, floats, tables = read_recipe(lock["quantized"])
    except (KeyError, TypeError, ValueError, AttributeError) as e:
        raise LockError(f"the lock {config.lock} is damaged: {e!r}. Write it again with --saveLock.") from e
    if lock.get("quantized") is None:
        plan = plain(resolved)
    elif integers is None:
        raise LockError(f"the lock {config.lock} is of an engine in INT8, and INT8 is not asked for. Give the flags that it was built with.")
    else:
        try:
            plan = integers(ranges, floats, tables)
        except (CalibrationError, NetworkError) as e:
            raise LockError(f"the lock {config.lock} holds ranges that do not fit this network: {e} Write it again with --saveLock.") from e
    return note_found(plan, config)


def read_recipe(data: Mapping[str, Any]) -> tuple[Ranges, frozenset[str], bool]:
    """What `recipe` put together. Raises KeyError, TypeError, ValueError or AttributeError for other data."""
    tensors = {str(n): Range(float(low), float(high)) for n, (low, high) in data["ranges"].items()}
    arrays = [{str(n): np.array(v, np.float32) for n, v in data[k].items()} for k in ("scalings", "corrections")]
    if not all(r.usable for r in tensors.values()) or not all(a.ndim == 1 and np.isfinite(a).all() for kind in arrays for a in kind.values()):
        raise ValueError("a range, scaling or correction is no such thing")
    sums = frozenset(map(str, data.get("float_sums", ())))
    ranges = Ranges(tensors, scalings=arrays[0], corrections=arrays[1], float_sums=sums)
    return ranges, frozenset(map(str, data["float_layers"])), bool(data.get("tables"))


def _lists(v: Any) -> Any:
    return [_lists(x) for x in v] if isinstance(v, list | tuple) else v


def _tuples(v: Any) -> Any:
    return tuple(_tuples(x) for x in v) if isinstance(v, list | tuple) else v
