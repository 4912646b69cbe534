"""INT8 from a floating-point network: calibrate, insert Q/DQ, and keep the integers only where the clock says that they pay.

Engines are built and timed in turns: floating point as permitted; every layer that can be quantized; the same with activations looked up,
where the backend does that (precision.tables); the faster one without the layers that were slower than their floating-point form; and, where
the user sets a budget of accuracy, the one that holds it. The fastest of those that hold it is kept; within the noise it is the one with
fewer integers. Layers that --layerPrecisions demands in INT8 stay in all of them. Where 16-bit floats are permitted too (--best), each engine
is tried without them as well (builder/select/whole_engine.py).

On a GPU kernels are chosen once more in the network, which takes seconds for each engine: only those that may be kept are tuned so.
"""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from time import perf_counter

import numpy as np

from whet.backends import Backend, get_backend
from whet.builder.batching.per_sample import as_one, dealt_at_last
from whet.builder.build import build
from whet.builder.candidates.sparse_weights import with_sparsity
from whet.builder.config import BuildConfig
from whet.builder.lock.relock import locked_again, note_found, read_recipe
from whet.builder.precision.accuracy_budget import SAMPLES, Fit, Judge, report_of
from whet.builder.precision.calibration import Calibration, calibrated_ranges, invented_ranges, is_explicit, prepared
from whet.builder.precision.comparison import compare_engines, slow_layers
from whet.builder.precision.int8_engines import Making, Tried, quantized_network, without_int8
from whet.builder.precision.int8_selection import candidates, fitted, keep, tuned, untimed
from whet.builder.precision.permissions import demanded_floats, demanded_integers
from whet.builder.progress import Noting, Progress
from whet.builder.verify.engine_values import EngineRun
from whet.builder.verify.verify_selected import kept_verified
from whet.engine.plan import EnginePlan
from whet.engine.report import CalibrationStep
from whet.errors import BuildError
from whet.measure.compare import Ranking
from whet.network import Layer, Network
from whet.precision import Ranges, find_places
from whet.precision.budget import Budget
from whet.precision.sensitivity import chosen_samples

__all__ = [
    "Calibration", "EngineRun", "build_int8", "calibrated_ranges", "invented_ranges", "is_explicit", "prepared", "slow_layers", "without_int8",
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
    """The fastest engine of a floating-point network with INT8 permitted, within `budget`. `config.precisions` names what else is.

    Raises CalibrationError, BuildError for a layer that --layerPrecisions demands in INT8 under obey and that cannot be, and what `build`
    raises. The plan's report says under "precision_choice" what was timed, under "accuracy" which layers the budget keeps out of INT8.
    """
    net, said = with_sparsity(net, config)

    def source(plan: EnginePlan) -> Network:
        if plan.report.quantized is None:
            return net
        ranges, skip, tables = read_recipe(plan.report.quantized)
        return quantized_network(prepared(net, config), ranges, skip, demanded_floats(config), tables=tables)

    began, tell = perf_counter(), Noting(progress)
    with _times_shared(config) as sharing:
        plan = kept_verified(lambda c: _built_int8(net, c, calibration, budget, tell, inputs), source, as_one(sharing), tell, inputs)
        plan = dealt_at_last(plan, source(plan), sharing, lambda c: build(source(plan), c, progress=tell), tell, inputs)
    plan.report.notes = [*said, *plan.report.notes]
    plan.report.build_seconds, plan.report.phase_seconds = perf_counter() - began, tell.seconds()  # of all the engines
    return note_found(plan, config)


@contextmanager
def _times_shared(config: BuildConfig) -> Iterator[BuildConfig]:
    """The same build with a timing cache for as long as it lasts where it has none: its engines share most of their layers."""
    if config.timing_cache != "" or config.optimization_level == 0:
        yield config
        return
    with tempfile.TemporaryDirectory(prefix="whet") as folder:
        yield dataclasses.replace(config, timing_cache=f"{folder}/times.sqlite")


def _built_int8(
    net: Network,
    config: BuildConfig,
    calibration: Calibration,
    budget: Budget | None,
    progress: Noting,
    inputs: Mapping[str, np.ndarray] | None,
) -> EnginePlan:
    notes: list[str] = []
    info: list[str] = []
    made = prepared(net, config)
    layers = find_places(made, demanded_floats(config)).layers
    if config.lock:

        def integers(ranges: Ranges, skip: frozenset[str], tables: bool) -> EnginePlan:
            return Making(net, made, ranges, config, layers, frozenset(), None, progress, inputs, tables=tables).integers("", skip).plan

        return locked_again(config, lambda found: build(net, found, progress=progress, inputs=inputs), integers)
    must = _demanded(made, layers, config, notes)
    if not layers:
        plan = build(net, without_int8(config), progress=progress, inputs=inputs)
        plan.report.notes.append("--int8: the network has no convolution or product with constant weights that 8 bits could compute")
        return plan
    steps: list[CalibrationStep] = []
    progress.stage("calibration", 0)
    ranges = calibrated_ranges(net, made, _counted(calibration, progress), config, notes.append, steps, info.append)
    backend = get_backend(config.backend, threads=max(config.threads, 0))
    later = backend.capabilities.overlapping_launches and config.in_network
    first = dataclasses.replace(config, in_network=config.in_network and not later)
    making = Making(net, made, ranges, first, layers, must, None, progress, inputs, notes, info)
    if budget is not None:
        samples = [] if calibration.samples is None else chosen_samples(calibration.samples(), SAMPLES)
        making.judge = Judge(made, "int8", ranges, samples, budget, config, progress)
    if not backend.capabilities.executes or config.optimization_level == 0:
        plan = untimed(making)
        plan.report.calibration_steps = steps
        return plan
    tried = candidates(making)
    fit = fitted(making, tried) if making.judge is not None else Fit()
    ranking = _compare_engines(making, tried, backend)
    if later:
        making.config = config
        tried = tuned(making, tried, ranking)
        ranking = _compare_engines(making, tried, backend)
    plan = keep(making, tried, ranking)
    plan.report.calibration_steps = steps
    if making.judge is not None and budget is not None:
        kept = next(t for t in tried if t.plan is plan)
        plan.report.accuracy = report_of(budget, fit, kept.judged_on, kept.verdict)
    return plan


def _counted(calibration: Calibration, progress: Progress) -> Calibration:
    """The same, telling of every sample that is run."""
    samples = calibration.samples
    if samples is None:
        return calibration

    def told() -> Iterator[Mapping[str, np.ndarray]]:
        for feeds in samples():
            yield feeds
            progress.step("samples")

    return dataclasses.replace(calibration, samples=told)


def _compare_engines(m: Making, tried: list[Tried], backend: Backend) -> Ranking:
    m.progress.stage("comparing engines", 1)
    ranking = compare_engines([t.plan for t in tried], backend, m.config)
    m.progress.step("done")
    return ranking


def _demanded(made: Network, layers: list[Layer], config: BuildConfig, notes: list[str]) -> frozenset[str]:
    """The layers that stay in INT8 because the user says so. Raises BuildError under obey for one that cannot be."""
    wanted = demanded_integers(config)
    able = {x.name for x in layers}
    for layer in made.layers:
        if wanted(layer) and layer.name not in able and layer.op in ("Conv", "ConvTranspose", "Gemm", "MatMul"):
            text = f"--layerPrecisions demands int8 for '{layer.name}' ({layer.op}), which has no quantized form (constant float weights)"
            if config.precision_constraints == "obey":
                raise BuildError(f"{text}. Leave it out, or use --precisionConstraints=prefer.")
            notes.append(text)
    return frozenset(x.name for x in layers if wanted(x))
