"""INT8 from a floating-point network: calibrate, insert Q/DQ, and keep integers only in layers that are faster with them.

Engine candidates: floating point as permitted; every layer that can be quantized in INT8; the same with activations looked up in tables, where
the backend has a kernel for that (precision.tables); the faster one without the layers that were slower than in floating point; and, under an
accuracy budget, one that holds it (precision_search.py). In a tie the engine with fewer integers is kept. Layers that --layerPrecisions
demands in INT8 stay in all of them. Where 16-bit floats are permitted too (--best), each engine is tried without them as well
(builder/select/whole_engine.py).

With the objective "size", layers that compute in floating point have 8-bit weights too, in all candidates: their files are equally small, and again
the fastest is kept. Kernels read such weights as floats, which loading computes.
"""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from time import perf_counter

import numpy as np

from whet.builder.batching.per_sample import apply_sample_mode, without_sample_mode
from whet.builder.build import build
from whet.builder.candidates.sparse_weights import apply_sparsity
from whet.builder.config import BuildConfig
from whet.builder.lock.relock import Quantization, build_locked, make_recipe, read_recipe, record_request
from whet.builder.precision.calibration import (
    Calibration,
    get_calibrated_ranges,
    is_explicit,
    make_placeholder_ranges,
    prepare,
    select_calibration_runs,
)
from whet.builder.precision.comparison import find_slow_layers, list_identifying_names
from whet.builder.precision.float16 import build_floats_within
from whet.builder.precision.permissions import make_float_demand_predicate, make_integer_demand_predicate, make_named_integer_predicate
from whet.builder.precision.precision_search import PrecisionEngine, PrecisionSearch, Strategy
from whet.builder.progress import Progress, ProgressLog
from whet.builder.verify.engine_values import EngineRun
from whet.builder.verify.verify_selected import build_verified
from whet.engine.plan import EnginePlan
from whet.errors import BuildError
from whet.network import Layer, Network
from whet.precision import Ranges, find_quantization_sites, quantize
from whet.precision.budget import Budget
from whet.precision.tables import TABLE, insert_tables
from whet.sparsity import TwoFourGuard
from whet.tactics import list_tactics

_LOOKED_UP = ", activations looked up"

__all__ = [
    "Calibration",
    "EngineRun",
    "build_int8",
    "find_slow_layers",
    "get_calibrated_ranges",
    "is_explicit",
    "make_placeholder_ranges",
    "prepare",
    "without_int8",
]  # fmt: skip


def build_int8(
    net: Network,
    config: BuildConfig,
    calibration: Calibration,
    *,
    budget: Budget | None = None,
    progress: Progress | None = None,
    inputs: Mapping[str, np.ndarray] | None = None,
) -> EnginePlan:
    """The fastest engine of a floating-point network with INT8 permitted, within `budget`. `config.precisions` lists the other permitted types.

    Raises CalibrationError, BuildError for a layer that --layerPrecisions demands in INT8 under obey and that cannot be, and the errors
    of `build`. The plan's report lists the timed engines under "precision_choice", and layers excluded by the budget under "accuracy".
    """
    net, said = apply_sparsity(net, config)

    def make_source(plan: EnginePlan) -> Network:
        if plan.report.quantized is None:
            return net
        return quantize_network(prepare(net, config), read_recipe(plan.report.quantized), make_float_demand_predicate(config))

    began, log = perf_counter(), ProgressLog(progress)
    with _share_times(config) as sharing:
        plan = build_verified(
            lambda c: _search_int8(net, c, calibration, budget, log, inputs), make_source, without_sample_mode(sharing), log, inputs
        )
        plan = apply_sample_mode(plan, make_source(plan), sharing, lambda c: build(make_source(plan), c, progress=log), log, inputs)
    plan.report.notes = [*said, *plan.report.notes, *_note_broken_two_four(net, plan, config)]
    plan.report.build_seconds, plan.report.phase_seconds = perf_counter() - began, log.seconds()  # of all the engines
    return record_request(plan, config)


def _note_broken_two_four(net: Network, plan: EnginePlan, config: BuildConfig) -> list[str]:
    """A note per layer that lost its 2:4 pattern by quantization (weights with a zero point, or rounded away from zero)."""
    noted = "\n".join(plan.report.notes)
    broken = TwoFourGuard(net).check(plan.network) if config.verify else []
    return [f"Quantization breaks the 2:4 weights of {x}: no sparse kernel can run it." for x in broken if f"'{x.layer}'" not in noted]


@contextmanager
def _share_times(config: BuildConfig) -> Iterator[BuildConfig]:
    """The same build; without a timing cache it gets a temporary one, because its engines share most of their layers."""
    if config.timing_cache != "" or config.optimization_level == 0:
        yield config
        return
    with tempfile.TemporaryDirectory(prefix="whet") as folder:
        yield dataclasses.replace(config, timing_cache=f"{folder}/times.sqlite")


def _search_int8(
    net: Network,
    config: BuildConfig,
    calibration: Calibration,
    budget: Budget | None,
    progress: ProgressLog,
    inputs: Mapping[str, np.ndarray] | None,
) -> EnginePlan:
    folded = prepare(net, config)
    layers = find_quantization_sites(folded, make_float_demand_predicate(config)).layers
    search = PrecisionSearch(Int8(), net, folded, Ranges({}), config, layers, progress, inputs)
    if config.lock:
        return _build_locked(search)
    demanded = _list_demanded_layers(folded, layers, config, search.notes)
    if not layers:
        plan = build(net, without_int8(config), progress=progress, inputs=inputs)
        plan.report.notes.append("--int8: the network has no convolution or product with constant weights that 8 bits could compute")
        return plan
    progress.stage("calibration", 0)
    search.strategy = Int8(demanded)
    search.runs = select_calibration_runs(folded, calibration, config, search.notes.append)
    search.ranges = get_calibrated_ranges(
        net, folded, _with_progress(calibration, progress), config, search.notes.append, search.calibration_steps, search.info.append, search.runs
    )
    search.set_budget(budget, calibration)
    return search.run()


def _build_locked(search: PrecisionSearch) -> EnginePlan:
    """The engine of the config's lock, from the ranges and layers that the lock holds."""

    def build_quantized(quantization: Quantization) -> EnginePlan:
        return Int8().build_quantized(search, "", quantization).plan

    def build_plain(config: BuildConfig) -> EnginePlan:
        return build(search.net, config, progress=search.progress, inputs=search.inputs)

    return build_locked(search.config, build_plain, build_quantized)


class Int8(Strategy):
    """INT8 in a precision search. `tables`: activations are looked up."""

    name, title = "int8", "INT8"
    pruning_rounds, least_gain = 2, 0.003  # smaller gains are within the noise
    fitting_rounds = 3
    refines_finalists, reports_accuracy = True, True

    def __init__(self, demanded: frozenset[str] = frozenset()):
        self.demanded, self.tables = demanded, False

    def build_first_candidates(self, search: PrecisionSearch) -> list[PrecisionEngine]:
        """Floating point (with 8-bit weights for the objective "size"), or INT8 only in layers that demand it; then all layers in INT8, without
        and with tables, the faster one last."""
        candidates = []
        if self.demanded:
            others = frozenset(x.name for x in search.layers) - self.demanded
            candidates.append(self.build(search, f"int8 where it is demanded ({len(self.demanded)} layers)", others))
        quantized = [self.build(search, "int8", frozenset())]
        if self._can_use_tables(search):
            self.tables = True
            quantized.append(self.build(search, "int8", frozenset()))
            computed_ms, table_ms = (c.plan.report.latency_ms or 0.0 for c in quantized)
            self.tables = table_ms <= computed_ms
            if not self.tables:
                quantized.reverse()
        if not candidates and search.config.objective == "size":
            candidates.append(self._build_small_floats(search))
        elif not candidates:  # built last: the time that floating point has to beat is known
            candidates.append(self._build_floats(search, quantized[-1].plan.report.latency_ms))
        return [*candidates, *quantized]

    def build(self, search: PrecisionSearch, title: str, float_layers: frozenset[str]) -> PrecisionEngine:
        return self.build_quantized(search, title, Quantization(search.ranges, float_layers, self.tables, search.config.objective == "size"))

    def build_quantized(self, search: PrecisionSearch, title: str, quantization: Quantization) -> PrecisionEngine:
        """The engine of the network with Q/DQ nodes."""
        net = quantize_network(search.prepared, quantization, make_float_demand_predicate(search.config))
        name = f"{title}{_LOOKED_UP}" if quantization.tables else title
        with search.progress.prefix_stages(name):
            plan = build(net, search.config, progress=search.progress, inputs=search.inputs)
        plan.report.quantized = make_recipe(quantization)
        return PrecisionEngine(name, plan, quantization.float_layers)

    def rebuild(self, search: PrecisionSearch, candidate: PrecisionEngine) -> PrecisionEngine:
        if candidate.plan.report.quantized is None:
            return self._build_floats(search)
        built = self.build_quantized(search, candidate.what.removesuffix(_LOOKED_UP), read_recipe(candidate.plan.report.quantized))
        if search.judge is not None:
            search.set_verdict(built)
        return built

    def build_fallback(self, search: PrecisionSearch) -> PrecisionEngine | None:
        return self._build_floats(search) if search.config.objective == "size" and not self.demanded else None

    def rank_candidates(self, candidates: Sequence[PrecisionEngine], allowed: Sequence[int]) -> list[int]:
        """The baseline first, then by the number of layers in floating point, descending."""
        return sorted(allowed, key=lambda i: (i > 0, -len(candidates[i].float_layers)))

    def describe(self, search: PrecisionSearch, candidates: Sequence[PrecisionEngine], index: int, shown: str) -> None:
        left = len(candidates[index].float_layers)
        if not any(c.is_allowed for c in candidates):
            text = f"No engine holds the accuracy budget: {shown}. The first one is kept; the demands for INT8 or 16 bits leave no other."
            search.notes.append(text)
        elif candidates[index].plan.report.quantized is None:
            search.notes.append(f"--int8 is permitted but does not pay here: {shown}. The engine computes in floating point.")
        elif left == len(search.layers):
            search.notes.append(f"--int8 pays for the size only: {shown}. Weights are stored in 8 bits, the engine computes in floating point.")
        elif index == 0:
            search.notes.append(f"INT8 pays nowhere but where it is demanded: {shown}.")
        else:
            floats = f"; {left} of {len(search.layers)} quantizable layers stay in floating point" if left else ""
            search.info.append(f"INT8 pays: {shown}{floats}.")

    def _build_small_floats(self, search: PrecisionSearch) -> PrecisionEngine:
        """The engine in floating point whose weights are stored in 8 bits: it needs no ranges of activations."""
        every = frozenset(x.name for x in search.layers)
        return self.build_quantized(search, "floating point with 8-bit weights", Quantization(Ranges({}), every, small_weights=True))

    def _build_floats(self, search: PrecisionSearch, incumbent_ms: float | None = None) -> PrecisionEngine:
        """The engine in floating point, within the budget where 16 bits are permitted; `incumbent_ms` as in `build`."""
        config, what = without_int8(search.config), "floating point"
        with search.progress.prefix_stages(what):
            if search.judge is None or not config.precisions:
                plan = build(search.net, config, progress=search.progress, inputs=search.inputs, incumbent_ms=incumbent_ms)
                return PrecisionEngine(what, plan)
            budget, samples = search.judge.budget, search.judge.analysis.samples
            plan, verdict = build_floats_within(
                search.net, search.prepared, config, budget, samples, progress=search.progress, inputs=search.inputs, known=search.judge
            )  # fmt: skip
        return PrecisionEngine(what, plan, verdict=verdict, judged_on="engine")

    def _can_use_tables(self, search: PrecisionSearch) -> bool:
        """True if the backend has a table kernel and the network an activation for it."""
        if not any(TABLE in t.composites for t in list_tactics(search.config.backend)):
            return False
        return insert_tables(quantize(search.prepared, search.ranges, skip=make_float_demand_predicate(search.config)), search.ranges) > 0


def _with_progress(calibration: Calibration, progress: Progress) -> Calibration:
    """The same calibration; every sample that is run is a step of `progress`."""
    samples = calibration.samples
    if samples is None:
        return calibration

    def iterate_counted() -> Iterator[Mapping[str, np.ndarray]]:
        for feeds in samples():
            yield feeds
            progress.step("samples")

    return dataclasses.replace(calibration, samples=iterate_counted)


def _list_demanded_layers(net: Network, layers: list[Layer], config: BuildConfig, notes: list[str]) -> frozenset[str]:
    """The layers that stay in INT8 because the user says so. Raises BuildError under obey for a named one that cannot be."""
    wanted, named = make_integer_demand_predicate(config), make_named_integer_predicate(config)
    able = {x.name for x in layers}
    for layer in net.layers:
        if named(layer) and layer.name not in able and layer.op in ("Conv", "ConvTranspose", "Gemm", "MatMul"):
            text = f"--layerPrecisions demands int8 for '{layer.name}' ({layer.op}), which has no quantized form (constant float weights)"
            if config.precision_constraints == "obey":
                raise BuildError(f"{text}. Leave it out, or use --precisionConstraints=prefer.")
            notes.append(text)
    return frozenset(x.name for x in layers if wanted(x))


def quantize_network(net: Network, quantization: Quantization, stays_float: Callable[[Layer], bool] = lambda layer: False) -> Network:
    """Inserts Q/DQ into the prepared `net`, except around layers accepted by `stays_float`."""

    def computes_in_floats(layer: Layer) -> bool:
        own, floats = list_identifying_names(layer), quantization.float_layers
        return stays_float(layer) or layer.name in floats or bool(floats & own)

    small_weights = (lambda layer: not stays_float(layer)) if quantization.small_weights else (lambda layer: False)
    quantized = quantize(net, quantization.ranges, skip=computes_in_floats, small_weights=small_weights)
    if quantization.tables:
        insert_tables(quantized, quantization.ranges)
    return quantized


def without_int8(config: BuildConfig) -> BuildConfig:
    """The same build without INT8, and without demands for it."""
    return dataclasses.replace(
        config, precisions=tuple(p for p in config.precisions if p != "int8"),
        layer_precisions=tuple((n, p) for n, p in config.layer_precisions if p != "int8"),
        layer_output_types=tuple((n, p) for n, p in config.layer_output_types if p != "int8"),
    )  # fmt: skip
