"""FP8 (e4m3) from a floating-point network: calibrate, correct, insert Q/DQ where precision.float8 has it, keep it where the clock says so.

Engines are built and timed in turns: floating point (or what INT8 gave, where that is permitted too), FP8, and FP8 without the layers whose
FP8 form was slower. The fastest that holds the user's budget is kept; within the noise the earlier one.

Without a budget FP8 still has to leave the outputs well above its noise, judged in emulation on calibration samples. Below ENOUGH_DB the sums
of skip connections stay in 16 bits (all products remain in FP8); where that leaves less than LEAST_DB, the most harmful layers do too.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterator, Mapping

import numpy as np

from whet.backends import get_backend
from whet.builder.build import build
from whet.builder.candidates.sparse_weights import with_sparsity
from whet.builder.config import BuildConfig
from whet.builder.lock.lock import read_lock
from whet.builder.lock.relock import locked_again, make_recipe, note_found
from whet.builder.precision.accuracy_budget import SAMPLES, Judge
from whet.builder.precision.calibration import Calibration, calibrated_ranges, prepared
from whet.builder.precision.comparison import compare_engines, known_as, slow_layers
from whet.builder.precision.permissions import demanded_floats, has_float8
from whet.builder.progress import Progress
from whet.builder.verify.engine_values import EngineRun
from whet.engine.plan import EnginePlan
from whet.engine.report import Float8Record, PrecisionCandidate
from whet.errors import BuildError, LockError
from whet.measure.compare import Ranking
from whet.network import Layer, Network
from whet.precision import Analysis, Ranges, chosen_samples, find_places, quantize
from whet.precision.budget import Budget, Verdict
from whet.precision.calibrate import content_digest
from whet.precision.float8 import adapted_weights, corrected, kept_out, pack_rounding, skip_sums, unpack_rounding

ENOUGH_DB = 30.0  # of the outputs' signal over FP8's noise, on calibration samples: docs/design/precision.md has what less of it costs
LEAST_DB = 28.0
_Engine = tuple[str, EnginePlan, frozenset[str]]  # what it is, the engine, the layers that it leaves in floating point
_NAMED = 4  # layers that a sentence names
_JUDGES = 16  # samples that FP8's choices are judged on
_LEAST_SAMPLES = 2 * _JUDGES
_LEAST_GAIN_DB = 0.3


def float8_network(made: Network, ranges: Ranges, skip: Mapping[str, str] | frozenset[str] = frozenset()) -> Network:
    """`made` (prepared) with Q/DQ of e4m3 but for the layers that FP8 leaves out (kept_out) and those of `skip`."""
    left = {*kept_out(made), *skip}
    return quantize(made, ranges, skip=lambda x: x.name in left or bool(left & known_as(x)), kind="fp8")


def float8_ranges(
    net: Network, made: Network, calibration: Calibration, config: BuildConfig, notes: list[str], info: list[str] | None = None,
    enough_db: float = ENOUGH_DB,
) -> Ranges:  # fmt: skip
    """Ranges for FP8, with the corrections that calibration data give; sums of skip connections left in floating point where the outputs lack
    `enough_db` without; and with the step "round" weights rounded with care, where that pays."""
    method = "minmax" if calibration.method == "auto" else calibration.method
    plain = dataclasses.replace(calibration, method=method, steps=())
    ranges = calibrated_ranges(net, made, plain, config, notes.append)
    if calibration.samples is None:
        if not ranges.corrections:
            notes.append("FP8 without calibration data has no corrections of biases: it loses more than it must. Give --calibData.")
        return ranges
    left = kept_out(made)
    heard = notes if info is None else info
    plain_ranges = _with_sums(made, corrected(made, ranges, calibration.samples(), EngineRun, left), calibration, left, heard, enough_db)
    ranges = dataclasses.replace(ranges, float_sums=plain_ranges.float_sums)
    if "round" not in calibration.steps or sum(1 for _ in calibration.samples()) < _LEAST_SAMPLES:
        return plain_ranges
    # Weights rounded against their layers' errors, kept where the outputs gain on samples that did not round them.
    judges = chosen_samples(calibration.samples(), _JUDGES)
    unseen = {content_digest(f) for f in judges}

    def others() -> Iterator[Mapping[str, np.ndarray]]:
        return (f for f in calibration.samples() if content_digest(f) not in unseen)  # type: ignore[misc]

    careful = dataclasses.replace(ranges, rounded=adapted_weights(made, ranges, others(), EngineRun, left))
    if not careful.rounded:
        return plain_ranges
    careful = corrected(made, careful, others(), EngineRun, left)
    names = [x.name for x in find_places(made, left).layers]
    near, far = (Analysis(made, "fp8", judges, EngineRun, r).snr(names) for r in (plain_ranges, careful))
    kept = far >= near + _LEAST_GAIN_DB
    said = "kept" if kept else "not kept"
    heard.append(f"FP8 weights rounded against their layers' errors: {near:.1f} dB to {far:.1f} at the outputs, on other samples; {said}.")
    return careful if kept else plain_ranges


def _with_sums(made: Network, ranges: Ranges, calibration: Calibration, left: Mapping[str, str], heard: list[str], enough_db: float) -> Ranges:
    """`ranges`, with the sums of skip connections in floating point where FP8 leaves the outputs less than `enough_db` and that helps."""
    assert calibration.samples is not None
    names = [x.name for x in find_places(made, left).layers]
    sums = skip_sums(made, left)
    judges = chosen_samples(calibration.samples(), _JUDGES) if names and sums else []
    if not judges:
        return ranges
    near = Analysis(made, "fp8", judges, EngineRun, ranges).snr(names)
    if near >= enough_db:
        return ranges
    wide = dataclasses.replace(ranges, float_sums=sums)
    far = Analysis(made, "fp8", judges, EngineRun, wide).snr(names)
    if far < near + _LEAST_GAIN_DB:
        return ranges
    heard.append(f"FP8: the sums of skip connections stay in 16 bits, which brings {near:.1f} dB to {far:.1f} at the outputs; products are in FP8.")
    return wide


def harmful(
    made: Network, ranges: Ranges, calibration: Calibration, config: BuildConfig, left: Mapping[str, str], *, enough_db: float = LEAST_DB,
    progress: Progress | None = None,
) -> dict[str, str]:  # fmt: skip
    """The layers beyond `left` that have to stay in floating point for the outputs to stand `enough_db` above FP8's noise: name -> reason."""
    samples = [] if calibration.samples is None else chosen_samples(calibration.samples(), _JUDGES)
    if not samples:
        return {}
    judge = Judge(made, "fp8", ranges, samples, Budget("snr", enough_db), config, progress)
    fit = judge.fit([x.name for x in find_places(made, left).layers], {})
    return {n: f"{why}; with it the outputs have less than {enough_db:g} dB in all" for n, why in fit.dropped.items()}


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
    (default: floating point). Where the backend has no FP8 kernels that one is given back, with a note.

    Raises CalibrationError, BuildError under `strict` where FP8 cannot be used, and what `build` raises. The plan's report says under
    "precision_choice" what was timed, under "fp8" which layers stay out and why.
    """
    net, said = with_sparsity(net, config)
    plan = _locked(net, config, progress, inputs) if config.lock else _built_float8(net, config, calibration, budget, other, progress, inputs)
    plan.report.notes = [*said, *plan.report.notes]
    return plan


def _built_float8(
    net: Network,
    config: BuildConfig,
    calibration: Calibration,
    budget: Budget | None,
    other: EnginePlan | None,
    progress: Progress | None,
    inputs: Mapping[str, np.ndarray] | None,
) -> EnginePlan:
    notes: list[str] = []
    info: list[str] = []
    plain = dataclasses.replace(config, precisions=tuple(p for p in config.precisions if p not in ("fp8", "int8")))
    floats = other or build(net, plain, progress=progress, inputs=inputs)
    made = prepared(net, config)
    pinned = demanded_floats(config)
    left = {**kept_out(made), **{x.name: "--layerPrecisions" for x in find_places(made).layers if pinned(x)}}
    layers = [x for x in find_places(made).layers if x.name not in left]
    if not layers or not has_float8(config):
        why = "this backend has no FP8 kernels, only an emulation (whet debug precision --fp8)" if layers else "no layer is one that FP8 takes"
        if config.strict:
            raise BuildError(f"--fp8 cannot be used: {why}. Leave out --strict to build without it.")
        return _unused(floats, f"--fp8 is permitted but not used: {why}.", config)
    enough = budget.limit if budget is not None and budget.kind == "snr" else ENOUGH_DB
    ranges = float8_ranges(net, made, calibration, config, notes, info, enough)
    if budget is None:
        left |= harmful(made, ranges, calibration, config, left, progress=progress)
        layers = [x for x in layers if x.name not in left]
    if not layers:
        return _unused(floats, f"--fp8 is not used: no layer of it leaves the outputs {LEAST_DB:g} dB.", config)
    judge = None
    if budget is not None:
        samples = [] if calibration.samples is None else chosen_samples(calibration.samples(), SAMPLES)
        judge = Judge(made, "fp8", ranges, samples, budget, config, progress)
    eight = dataclasses.replace(config, precisions=tuple(dict.fromkeys((*plain.precisions, "fp8"))))

    def low(skip: frozenset[str]) -> EnginePlan:
        plan = build(float8_network(made, ranges, skip | set(left)), eight, progress=progress, inputs=inputs)
        plan.report.quantized = make_recipe(ranges, skip | set(left), kind="fp8", rounded=pack_rounding(made, ranges.rounded))
        return plan

    backend = get_backend(config.backend, threads=max(config.threads, 0))
    if not backend.capabilities.executes or config.optimization_level == 0:
        plan = low(frozenset())
        plan.report.info = [*plan.report.info, *info]
        plan.report.notes += [*notes, "FP8 is used wherever it can be: at this level nothing is timed, so it may not pay"]
        return note_found(plan, config)
    tried = _tried((_name(other), floats, frozenset()), low, layers, judge)
    verdicts: list[Verdict | None] = [None] * len(tried)
    if judge is not None:
        for i, (_, plan, skip) in enumerate(tried[1:], 1):
            verdicts[i] = judge.engine(plan, config) or judge.low([x.name for x in layers if x.name not in skip])
    ranking = compare_engines([plan for _, plan, _ in tried], backend, config)
    return note_found(_kept(tried, verdicts, ranking, left, ranges.float_sums, notes, info), config)


def _unused(floats: EnginePlan, why: str, config: BuildConfig) -> EnginePlan:
    """The engine in floating point, with a note."""
    floats.report.notes = [*floats.report.notes, why]
    return note_found(floats, config)


def _tried(floats: _Engine, low: Callable[[frozenset[str]], EnginePlan], layers: list[Layer], judge: Judge | None) -> list[_Engine]:
    """The engine that FP8 competes with; all FP8; FP8 without the layers that it makes slower; and without those that the budget forbids."""
    tried = [floats, ("fp8", low(frozenset()), frozenset[str]())]
    slow = slow_layers(floats[1], tried[1][1], layers)
    if slow and len(slow) < len(layers):
        tried.append((f"fp8 without {len(slow)} layers that do not pay", low(slow), slow))
    if judge is not None:
        last = tried[-1][2]
        fit = judge.fit([x.name for x in layers if x.name not in last], {})
        skip = last | frozenset(fit.dropped)
        if fit.dropped and len(skip) < len(layers):
            tried.append((f"fp8 without {len(skip)} layers, within the budget", low(skip), skip))
    return tried


def is_float8_lock(config: BuildConfig) -> bool:
    """Whether the lock that a build obeys holds an engine in FP8."""
    found = read_lock(config.lock).get("quantized") if config.lock else None
    return isinstance(found, dict) and found.get("kind") == "fp8"


def _locked(net: Network, config: BuildConfig, progress: Progress | None, inputs: Mapping[str, np.ndarray] | None) -> EnginePlan:
    """The engine that the lock holds: its ranges, corrections and layers in FP8, or an engine in floating point."""
    packed = (read_lock(str(config.lock)).get("quantized") or {}).get("rounded", {})

    def low(ranges: Ranges, skip: frozenset[str], tables: bool) -> EnginePlan:
        made = prepared(net, config)
        try:
            careful = dataclasses.replace(ranges, rounded=unpack_rounding(made, packed))
        except (KeyError, ValueError) as e:
            raise LockError(f"the lock {config.lock} is damaged: {e!r}. Write it again with --saveLock.") from e
        plan = build(quantize(made, careful, skip=skip, kind="fp8"), config, progress=progress, inputs=inputs)
        plan.report.quantized = make_recipe(ranges, skip, tables, "fp8", packed)
        return plan

    return locked_again(config, lambda found: build(net, found, progress=progress, inputs=inputs), low)


def _name(other: EnginePlan | None) -> str:
    return "floating point" if other is None else "int8 or floating point"


def _kept(
    tried: list[_Engine], verdicts: list[Verdict | None], ranking: Ranking, left: Mapping[str, str],
    sums: Collection[str], notes: list[str], info: list[str],
) -> EnginePlan:  # fmt: skip
    """The fastest that holds the budget; the earlier one of those within the noise."""
    holds = [v is None or v.holds for v in verdicts]
    kept = ranking.select([i for i in range(len(tried)) if holds[i]])
    middle, spread = ([1e3 * s(i) for i in range(len(tried))] for s in (ranking.seconds, ranking.spread))
    plan = tried[kept][1]
    earlier = plan.report.precision_choice
    plan.report.latency_ms = middle[kept]
    plan.report.precision_choice = [
        *earlier,
        *(
            PrecisionCandidate(what, ms, s, i == kept, h, sorted(skip), None if v is None else v.value)
            for i, ((what, _, skip), ms, s, v, h) in enumerate(zip(tried, middle, spread, verdicts, holds, strict=True))
        ),
    ]
    plan.report.fp8 = Float8Record(dict(left), sorted(sums))
    shown = ", ".join(f"{what} {ms:.3f} ms{'' if h else ' (outside the budget)'}" for (what, _, _), ms, h in zip(tried, middle, holds, strict=True))
    said = f"FP8 pays: {shown}; {len(left)} layers stay out for accuracy or size."
    if kept == 0:
        said = f"--fp8 is permitted but does not pay here: {shown}."
    plan.report.notes = [*plan.report.notes, *notes]
    plan.report.info = [*plan.report.info, *info, said, *([_left_out(left)] if left and kept else [])]
    return plan


def _left_out(left: Mapping[str, str]) -> str:
    """Which layers are not in FP8, by their reasons."""
    names: dict[str, list[str]] = {}
    for name, why in left.items():
        names.setdefault(why, []).append(name)
    shown = [f"{', '.join(n[:_NAMED])}{f' and {len(n) - _NAMED} more' if len(n) > _NAMED else ''} ({why})" for why, n in names.items()]
    return f"Not in FP8: {'; '.join(shown)}."
