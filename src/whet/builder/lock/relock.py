"""Locks of engines whose precisions were determined by calibration or an accuracy budget: neither is repeated under a lock.

Such a build ends in a plain build of another network (Q/DQ inserted) or with other options (layers kept in FP32). The plan's report holds the
requested precisions (`asked`), and the ranges and the layers left in floating point (`quantized`); the lock stores both.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from whet.builder.config import BuildConfig
from whet.builder.lock.lock import read_lock
from whet.engine.plan import EnginePlan
from whet.engine.report import QuantizationRecipe, RequestedPrecisions, decode_recipe
from whet.engine.schema import encode
from whet.errors import CalibrationError, EngineError, LockError, NetworkError
from whet.precision import Ranges
from whet.precision.ranges import Range

_FOUND = ("precisions", "precision_constraints", "layer_precisions", "layer_output_types")


def record_request(plan: EnginePlan, request: BuildConfig) -> EnginePlan:
    """Records the requested precisions in the report."""
    plan.report.asked = _request(request)
    return plan


def _request(config: BuildConfig) -> RequestedPrecisions:
    pairs = [[(str(n), str(p)) for n, p in rows] for rows in (config.layer_precisions, config.layer_output_types)]
    return RequestedPrecisions(list(config.precisions), config.precision_constraints, *pairs)


@dataclass(frozen=True)
class Quantization:
    """Where Q/DQ nodes are inserted in a network, and with which ranges."""

    ranges: Ranges
    float_layers: frozenset[str] = frozenset()  # quantizable layers that stay in floating point
    tables: bool = False  # activations are computed by lookup tables
    small_weights: bool = False  # weights of layers in floating point are stored in 8 bits


def make_recipe(quantization: Quantization, kind: str = "int8", rounded: Mapping[str, str] | None = None) -> QuantizationRecipe:
    """The recipe of a quantized network. `rounded`: adapted weights as `whet.precision.float8.pack_rounding` writes them."""
    ranges = quantization.ranges
    return QuantizationRecipe(
        tables=quantization.tables,
        float_layers=sorted(quantization.float_layers),
        small_weights=quantization.small_weights,
        ranges={n: (float(r.low), float(r.high)) for n, r in sorted(ranges.tensors.items())},
        scalings={n: [float(v) for v in a] for n, a in sorted(ranges.scalings.items())},
        corrections={n: [float(v) for v in a] for n, a in sorted(ranges.corrections.items())},
        float_sums=sorted(ranges.float_sums),
        kind=kind,
        rounded=dict(rounded or {}),
    )


def build_locked(
    config: BuildConfig, plain: Callable[[BuildConfig], EnginePlan], integers: Callable[[Quantization], EnginePlan] | None = None
) -> EnginePlan:
    """The engine of `config.lock`: built by `integers` as the lock says, or by `plain` with the locked options.

    Raises LockError for a lock of another version or of other requested precisions.
    """
    assert config.lock, "asked for without a lock"
    lock = read_lock(config.lock)
    asked = lock.get("asked")
    if asked is None:
        return plain(config)
    now = encode(_request(config))
    moved = [f"the option {k}: was {asked.get(k)}, is {now[k]}" for k in _FOUND if asked.get(k) != now[k]] if isinstance(asked, dict) else ["asked"]
    if moved:
        raise LockError("the lock cannot be kept, because something moved:\n  " + "\n  ".join(moved))
    try:
        if lock.get("quantized") is None:
            found = {k: _convert_lists_to_tuples(lock["options"][k]) for k in _FOUND}
            resolved = dataclasses.replace(config, **found)
        else:
            quantization = read_recipe(decode_recipe(lock["quantized"], "quantized"))
    except (EngineError, KeyError, TypeError, ValueError, AttributeError) as e:
        raise LockError(f"the lock {config.lock} is damaged: {e!r}. Write it again with --saveLock.") from e
    if lock.get("quantized") is None:
        plan = plain(resolved)
    elif integers is None:
        raise LockError(f"the lock {config.lock} is of an engine in INT8, and INT8 is not asked for. Give the flags that it was built with.")
    else:
        try:
            plan = integers(quantization)
        except (CalibrationError, NetworkError) as e:
            raise LockError(f"the lock {config.lock} holds ranges that do not fit this network: {e} Write it again with --saveLock.") from e
    return record_request(plan, config)


def read_recipe(recipe: QuantizationRecipe) -> Quantization:
    """The quantization that a recipe describes. Raises ValueError for invalid ranges."""
    tensors = {n: Range(low, high) for n, (low, high) in recipe.ranges.items()}
    scalings, corrections = ({n: np.array(v, np.float32) for n, v in rows.items()} for rows in (recipe.scalings, recipe.corrections))
    if unusable := [n for n, r in tensors.items() if not r.usable]:
        raise ValueError(f"the range of '{unusable[0]}' cannot be used")
    if not all(np.isfinite(a).all() for a in (*scalings.values(), *corrections.values())):
        raise ValueError("a scaling or correction is not finite")
    ranges = Ranges(tensors, scalings=scalings, corrections=corrections, float_sums=frozenset(recipe.float_sums))
    return Quantization(ranges, frozenset(recipe.float_layers), recipe.tables, recipe.small_weights)


def _convert_lists_to_tuples(v: Any) -> Any:
    return tuple(_convert_lists_to_tuples(x) for x in v) if isinstance(v, list | tuple) else v
