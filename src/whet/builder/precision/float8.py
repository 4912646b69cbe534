"""FP8 (e4m3) from a floating-point network: calibrate, correct, insert Q/DQ, and keep FP8 only if it is faster.

Engine candidates: floating point (or the INT8 engine, where that is permitted too), FP8, FP8 without the layers that were slower in it, and one
that holds the accuracy budget (precision_search.py). In a tie the earlier one is kept.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from time import perf_counter

import numpy as np

from whet.builder.build import build
from whet.builder.candidates.sparse_weights import apply_sparsity
from whet.builder.config import BuildConfig
from whet.builder.lock.lock import read_lock
from whet.builder.lock.relock import Quantization, build_locked, make_recipe, record_request
from whet.builder.precision.calibration import Calibration, prepare, select_calibration_runs
from whet.builder.precision.float8_ranges import ENOUGH_DB, LEAST_DB, calibrate_float8_ranges, find_sensitive_layers, insert_float8
from whet.builder.precision.permissions import has_float8, make_float_demand_predicate
from whet.builder.precision.precision_search import PrecisionEngine, PrecisionSearch, Strategy
from whet.builder.progress import Progress, ProgressLog
from whet.engine.plan import EnginePlan
from whet.engine.report import Float8Record
from whet.errors import BuildError, LockError
from whet.network import Network
from whet.precision import Ranges, find_quantization_sites, quantize
from whet.precision.budget import Budget
from whet.precision.float8 import list_excluded_layers, pack_rounding, unpack_rounding

_NAMED = 4  # layers named in a message


def build_float8(
    net: Network,
    config: BuildConfig,
    calibration: Calibration,
    *,
    budget: Budget | None = None,
    other: EnginePlan | None = None,
    progress: Progress | None = None,
    inputs: Mapping[str, np.ndarray] | None = None,
) -> EnginePlan:
    """The fastest engine of a floating-point network with FP8 permitted, within `budget`; `other` is the engine that it competes with
    (default: floating point). Without FP8 kernels on the backend, `other` is returned with a note.

    Raises CalibrationError, BuildError under `strict` if FP8 cannot be used, and the errors of `build`. The plan's report lists the timed
    engines under "precision_choice", and the layers not in FP8 with reasons under "fp8".
    """
    net, said = apply_sparsity(net, config)
    began, log = perf_counter(), ProgressLog(progress)
    if config.lock:
        plan = _build_locked(net, config, log, inputs)
    else:
        plan = _search_float8(net, config, calibration, budget, other, log, inputs)
    plan.report.notes = [*said, *plan.report.notes]
    before = {} if other is None else other.report.phase_seconds
    plan.report.build_seconds = perf_counter() - began + (0.0 if other is None else other.report.build_seconds)
    plan.report.phase_seconds = before | {name: s + before.get(name, 0.0) for name, s in log.seconds().items()}  # of all the engines
    return plan


def _search_float8(
    net: Network,
    config: BuildConfig,
    calibration: Calibration,
    budget: Budget | None,
    other: EnginePlan | None,
    progress: ProgressLog,
    inputs: Mapping[str, np.ndarray] | None,
) -> EnginePlan:
    plain = dataclasses.replace(config, precisions=tuple(p for p in config.precisions if p not in ("fp8", "int8")))
    baseline = PrecisionEngine(
        "floating point" if other is None else "int8 or floating point", other or build(net, plain, progress=progress, inputs=inputs)
    )
    folded = prepare(net, config)
    stays_float = make_float_demand_predicate(config)
    left_out = {**list_excluded_layers(folded), **{x.name: "--layerPrecisions" for x in find_quantization_sites(folded).layers if stays_float(x)}}
    layers = [x for x in find_quantization_sites(folded).layers if x.name not in left_out]
    if not layers or not has_float8(config):
        why = "this backend has no FP8 kernels, only an emulation (whet debug precision --fp8)" if layers else "no layer fits FP8"
        if config.strict:
            raise BuildError(f"--fp8 cannot be used: {why}. Leave out --strict to build without it.")
        return _without_float8(baseline.plan, f"--fp8 is permitted but not used: {why}.", config)
    search = PrecisionSearch(Float8(baseline, left_out), net, folded, Ranges({}), config, layers, progress, inputs)
    enough_db = budget.limit if budget is not None and budget.kind == "snr" else ENOUGH_DB
    progress.stage("calibration", 0)
    search.runs = select_calibration_runs(folded, calibration, config, search.notes.append)
    search.ranges = calibrate_float8_ranges(net, folded, calibration, config, search.notes, search.info, enough_db, search.runs)
    if budget is None:
        progress.stage("accuracy", 0)
        left_out |= find_sensitive_layers(folded, search.ranges, calibration, config, left_out, progress=progress)
        search.layers = [x for x in layers if x.name not in left_out]
    if not search.layers:
        return _without_float8(baseline.plan, f"--fp8 is not used: even a single FP8 layer reduces the outputs below {LEAST_DB:g} dB.", config)
    search.set_budget(budget, calibration)
    return record_request(search.run(), config)


class Float8(Strategy):
    """FP8 in a precision search. `left_out`: layers that are never in FP8 -> reason."""

    name, title = "fp8", "FP8"
    pruning_rounds, least_gain = 1, 0.0
    fitting_rounds = 0
    refines_finalists, reports_accuracy = False, False

    def __init__(self, baseline: PrecisionEngine, left_out: Mapping[str, str]):
        self.baseline, self.left_out = baseline, left_out

    def build_first_candidates(self, search: PrecisionSearch) -> list[PrecisionEngine]:
        return [self.baseline, self.build(search, "fp8", frozenset())]

    def build(self, search: PrecisionSearch, title: str, float_layers: frozenset[str]) -> PrecisionEngine:
        precisions = (*(p for p in search.config.precisions if p not in ("fp8", "int8")), "fp8")
        excluded = float_layers | set(self.left_out)
        with search.progress.prefix_stages(title):
            plan = build(
                insert_float8(search.prepared, search.ranges, excluded), dataclasses.replace(search.config, precisions=precisions),
                progress=search.progress, inputs=search.inputs,
            )  # fmt: skip
        rounded = pack_rounding(search.prepared, search.ranges.rounded)
        plan.report.quantized = make_recipe(Quantization(search.ranges, frozenset(excluded)), kind="fp8", rounded=rounded)
        return PrecisionEngine(title, plan, float_layers)

    def rebuild(self, search: PrecisionSearch, candidate: PrecisionEngine) -> PrecisionEngine:
        is_baseline = candidate.plan is self.baseline.plan
        return candidate if is_baseline else self.build(search, candidate.what, candidate.float_layers)

    def rank_candidates(self, candidates: Sequence[PrecisionEngine], allowed: Sequence[int]) -> list[int]:
        """In the order of building, so that the baseline wins a tie."""
        return list(allowed)

    def describe(self, search: PrecisionSearch, candidates: Sequence[PrecisionEngine], index: int, shown: str) -> None:
        candidates[index].plan.report.fp8 = Float8Record(dict(self.left_out), sorted(search.ranges.float_sums))
        if index == 0:
            search.info.append(f"--fp8 is permitted but not faster here: {shown}.")
            return
        search.info.append(f"FP8 pays: {shown}; {len(self.left_out)} layers stay out for accuracy or size.")
        if self.left_out:
            search.info.append(describe_left_out(self.left_out))


def _without_float8(floats: EnginePlan, why: str, config: BuildConfig) -> EnginePlan:
    """The engine in floating point, with a note."""
    floats.report.notes = [*floats.report.notes, why]
    return record_request(floats, config)


def is_float8_lock(config: BuildConfig) -> bool:
    """True if the build's lock describes an FP8 engine."""
    found = read_lock(config.lock).get("quantized") if config.lock else None
    return isinstance(found, dict) and found.get("kind") == "fp8"


def _build_locked(net: Network, config: BuildConfig, progress: Progress | None, inputs: Mapping[str, np.ndarray] | None) -> EnginePlan:
    """The engine that the lock holds: its ranges, corrections and layers in FP8, or an engine in floating point."""
    packed = (read_lock(str(config.lock)).get("quantized") or {}).get("rounded", {})

    def build_low(quantization: Quantization) -> EnginePlan:
        prepared = prepare(net, config)
        try:
            careful = dataclasses.replace(quantization.ranges, rounded=unpack_rounding(prepared, packed))
        except (KeyError, ValueError) as e:
            raise LockError(f"the lock {config.lock} is damaged: {e!r}. Write it again with --saveLock.") from e
        plan = build(quantize(prepared, careful, skip=quantization.float_layers, kind="fp8"), config, progress=progress, inputs=inputs)
        plan.report.quantized = make_recipe(quantization, "fp8", packed)
        return plan

    return build_locked(config, lambda locked: build(net, locked, progress=progress, inputs=inputs), build_low)


def describe_left_out(left: Mapping[str, str]) -> str:
    """A message that lists the layers not in FP8 by reason."""
    names: dict[str, list[str]] = {}
    for name, why in left.items():
        names.setdefault(why, []).append(name)
    shown = [f"{', '.join(n[:_NAMED])}{f' and {len(n) - _NAMED} more' if len(n) > _NAMED else ''} ({why})" for why, n in names.items()]
    return f"Not in FP8: {'; '.join(shown)}."
