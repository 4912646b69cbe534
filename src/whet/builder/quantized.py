"""INT8 from a floating-point network: calibrate, insert Q/DQ, and keep the integers only where the clock says that they pay.

Engines are built and timed in turns: floating point as permitted; every layer that can be quantized; the same with activations looked up,
where the backend does that (precision.tables); the faster one without the layers that were slower than their floating-point form; and, where
the user sets a budget of accuracy, the one that holds it. The fastest of those that hold it is kept; within the noise it is the one with
fewer integers. Layers that --layerPrecisions demands in INT8 stay in all of them. Where 16-bit floats are permitted too (--best), each engine
is tried without them as well (builder/whole.py).

On a GPU kernels are chosen once more in the network, which takes seconds for each engine: only those that may be kept are tuned so.
"""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np

from whet.backends import get_backend
from whet.builder.building import build
from whet.builder.calibrating import Calibration, calibrated_ranges, invented_ranges, is_explicit, prepared
from whet.builder.config import BuildConfig
from whet.builder.engine_run import EngineRun
from whet.builder.floats import build_floats_within
from whet.builder.payoff import in_turns, known_as, layer_times, slow_layers
from whet.builder.precision import demanded_floats, demanded_integers
from whet.builder.progress import Noting, Progress
from whet.builder.relock import locked_again, note_found, read_recipe, recipe
from whet.builder.verified import kept_verified
from whet.builder.within import SAMPLES, Fit, Judge, report_of
from whet.engine.plan import EnginePlan
from whet.errors import BuildError
from whet.network import Layer, Network
from whet.precision import Ranges, find_places, quantize
from whet.precision.budget import Budget, Verdict
from whet.precision.sensitivity import chosen_samples
from whet.precision.tables import TABLE, insert_tables
from whet.tactics import tactics_of

__all__ = [
    "Calibration", "EngineRun", "build_int8", "calibrated_ranges", "invented_ranges", "is_explicit", "prepared", "slow_layers", "without_int8",
]  # fmt: skip

_LOOKED_UP = ", activations looked up"
_ROUNDS_OF_DROPPING = 2
_OPEN = 1.15  # of the fastest engine: what choosing kernels in the network could still put in front
_LEAST_GAIN = 0.003  # of the engine's time, that leaving slow layers out has to promise: what is less cannot be told from the noise
_ROUNDS_OF_FITTING = 3  # an engine that misses what its emulation held loses a tenth of its integers, so often


@dataclass
class _Tried:
    """One engine: what it is, the layers that it leaves in floating point, the accuracy that was found (None: not judged)."""

    what: str
    plan: EnginePlan
    skip: frozenset[str]
    verdict: Verdict | None = None
    judged_on: str = ""
    tables: bool = False

    @property
    def allowed(self) -> bool:
        return self.verdict is None or self.verdict.holds


@dataclass
class _Making:
    """What the engines of one build are made from."""

    net: Network
    made: Network
    ranges: Ranges
    config: BuildConfig
    layers: list[Layer]
    must: frozenset[str]  # demanded in INT8
    judge: Judge | None = None
    progress: Noting = field(default_factory=lambda: Noting(None))
    inputs: Mapping[str, np.ndarray] | None = None
    notes: list[str] = field(default_factory=list)
    info: list[str] = field(default_factory=list)
    tables: bool = False  # activations are looked up

    def floats(self, rival_ms: float | None = None) -> _Tried:
        """The engine in floating point, within the budget where 16 bits are permitted; `rival_ms` as `build` has it."""
        plain, what = without_int8(self.config), "floating point"
        with self.progress.making(what):
            if self.judge is None or not plain.precisions:
                plan = build(self.net, plain, progress=self.progress, inputs=self.inputs, rival_ms=rival_ms)
                return _Tried(what, plan, frozenset())
            plan, verdict = build_floats_within(
                self.net, self.made, plain, self.judge.budget, self.judge.analysis.samples, progress=self.progress, inputs=self.inputs
            )  # fmt: skip
        return _Tried(what, plan, frozenset(), verdict, "engine")

    def integers(self, what: str, skip: frozenset[str]) -> _Tried:
        """The engine with every quantizable layer in INT8 but those of `skip` and those that the user keeps in floating point."""
        chosen = quantized_network(self.made, self.ranges, skip, demanded_floats(self.config), tables=self.tables)
        name = f"{what}{_LOOKED_UP}" if self.tables else what
        with self.progress.making(name):
            plan = build(chosen, self.config, progress=self.progress, inputs=self.inputs)
        plan.report["quantized"] = recipe(self.ranges, skip, self.tables)
        return _Tried(name, plan, skip, tables=self.tables)

    def tuned(self, t: _Tried) -> _Tried:
        """The same engine once more, with what `config` now says of choosing in the network; judged where there is a budget."""
        self.tables = t.tables
        if "quantized" not in t.plan.report:
            return self.floats()
        found = self.integers(t.what.removesuffix(_LOOKED_UP), t.skip)
        if self.judge is not None:
            _judged(self, found)
        return found

    def looks_up(self) -> bool:
        """Whether the backend has a kernel for tables, and the network something for it to look up."""
        if not any(TABLE in t.hints for t in tactics_of(self.config.backend)):
            return False
        return insert_tables(quantize(self.made, self.ranges, skip=demanded_floats(self.config)), self.ranges) > 0

    def low(self, skip: frozenset[str]) -> list[str]:
        return [x.name for x in self.layers if x.name not in skip]


def quantized_network(
    made: Network, ranges: Ranges, skip: frozenset[str], pinned: Callable[[Layer], bool] = lambda x: False, *, tables: bool = False
) -> Network:
    """`made` (prepared) with Q/DQ but for the layers that `skip` names or `pinned` keeps; `tables`: before its activations too."""
    chosen = quantize(made, ranges, skip=lambda x: pinned(x) or x.name in skip or bool(skip & known_as(x)))
    if tables:
        insert_tables(chosen, ranges)
    return chosen


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
    def source(plan: EnginePlan) -> Network:
        if "quantized" not in plan.report:
            return net
        ranges, skip, tables = read_recipe(plan.report["quantized"])
        return quantized_network(prepared(net, config), ranges, skip, demanded_floats(config), tables=tables)

    began, tell = perf_counter(), Noting(progress)
    with _times_shared(config) as sharing:
        plan = kept_verified(lambda c: _built_int8(net, c, calibration, budget, tell, inputs), source, sharing, tell, inputs)
    plan.report["build_seconds"], plan.report["phase_seconds"] = perf_counter() - began, tell.seconds()  # of all the engines
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
            return _Making(net, made, ranges, config, layers, frozenset(), None, progress, inputs, tables=tables).integers("", skip).plan

        return locked_again(config, lambda found: build(net, found, progress=progress, inputs=inputs), integers)
    must = _demanded(made, layers, config, notes)
    if not layers:
        plan = build(net, without_int8(config), progress=progress, inputs=inputs)
        plan.report["notes"].append("--int8: the network has no convolution or product with constant weights that 8 bits could compute")
        return plan
    extra: dict[str, Any] = {}
    progress.stage("calibration", 0)
    ranges = calibrated_ranges(net, made, _counted(calibration, progress), config, notes.append, extra, info.append)
    machine = get_backend(config.backend, threads=max(config.threads, 0))
    later = getattr(machine, "overlaps", False) and config.in_network
    first = dataclasses.replace(config, in_network=config.in_network and not later)
    making = _Making(net, made, ranges, first, layers, must, None, progress, inputs, notes, info)
    if budget is not None:
        samples = [] if calibration.samples is None else chosen_samples(calibration.samples(), SAMPLES)
        making.judge = Judge(made, "int8", ranges, samples, budget, config, progress)
    if not getattr(machine, "runs", True) or config.optimization_level == 0:
        plan = _untimed(making)
        plan.report.update(extra)
        return plan
    tried = _candidates(making)
    fit = _fitted(making, tried) if making.judge is not None else Fit()
    times = _in_turns(making, tried, machine)
    if later:
        making.config = config
        tried = _tuned(making, tried, times)
        times = _in_turns(making, tried, machine)
    plan = _kept(making, tried, times)
    plan.report.update(extra)
    if making.judge is not None and budget is not None:
        kept = next(t for t in tried if t.plan is plan)
        plan.report["accuracy"] = report_of(budget, fit, kept.judged_on, kept.verdict)
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


def _in_turns(m: _Making, tried: list[_Tried], machine: Any) -> list[list[float]]:
    """Seconds of the engines, run in turns."""
    m.progress.stage("engines in turns", 1)
    times = in_turns([t.plan for t in tried], machine, m.config)
    m.progress.step("done")
    return times


def without_int8(config: BuildConfig) -> BuildConfig:
    """The same build without INT8, and without demands for it."""
    return dataclasses.replace(
        config, precisions=tuple(p for p in config.precisions if p != "int8"),
        layer_precisions=tuple((n, p) for n, p in config.layer_precisions if p != "int8"),
        layer_output_types=tuple((n, p) for n, p in config.layer_output_types if p != "int8"),
    )  # fmt: skip


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


def _untimed(m: _Making) -> EnginePlan:
    """Where nothing is timed: integers wherever they can be, and the budget allows it."""
    names = [x.name for x in m.layers]
    fit = Fit() if m.judge is None else m.judge.fit(names, {}, m.must)
    plan = m.integers("int8", frozenset(fit.dropped)).plan
    if m.judge is not None:
        plan.report["accuracy"] = report_of(m.judge.budget, fit, "emulation", None)
        _say_budget(m, fit)
    plan.report["notes"] += [*m.notes, "INT8 is used wherever it can be: at this level nothing is timed, so it may not pay"]
    plan.report["info"] = [*plan.report.get("info", []), *m.info]
    return plan


def _candidates(m: _Making) -> list[_Tried]:
    """Floating point (or INT8 only where it is demanded), all integers, and integers without what does not pay."""
    everything = frozenset(x.name for x in m.layers)
    demanded = [m.integers(f"int8 where it is demanded ({len(m.must)} layers)", everything - m.must)] if m.must else []
    tried = [m.integers("int8", frozenset())]
    if m.looks_up():
        m.tables = True
        tried.append(m.integers("int8", frozenset()))
        computed, looked_up = (t.plan.report.get("latency_ms", 0.0) for t in tried)
        m.tables = looked_up <= computed
        if not m.tables:
            tried.reverse()  # what comes is made from the faster one
    tried = [*(demanded or [m.floats(tried[-1].plan.report.get("latency_ms"))]), *tried]  # floats come last: it is known whom they have to beat
    for _ in range(_ROUNDS_OF_DROPPING):
        last = tried[-1]
        times = layer_times(tried[0].plan, last.plan, m.layers)
        slow = slow_layers(tried[0].plan, last.plan, m.layers) - last.skip - m.must
        gain = sum(times[n][1] - times[n][0] for n in slow)
        if gain < _LEAST_GAIN * last.plan.report.get("latency_ms", 0.0) or not slow or len(slow | last.skip) >= len(m.layers):
            break
        wider = last.skip | slow
        tried.append(m.integers(f"int8 without {len(wider)} layers that do not pay", wider))
    return tried


def _tuned(m: _Making, tried: list[_Tried], times: list[list[float]]) -> list[_Tried]:
    """The engines with their kernels chosen in the network too: of floating point and of integers the fastest that may be kept."""
    middle = [median(t) for t in times]
    open_ = [i for i, t in enumerate(tried) if t.allowed] or [0]
    kinds = [[i for i in open_ if ("quantized" in tried[i].plan.report) == quantized] for quantized in (False, True)]
    found = list(tried)
    for i in (min(kind, key=lambda i: middle[i]) for kind in kinds if kind):
        if middle[i] <= _OPEN * min(middle[k] for k in open_):
            again = m.tuned(tried[i])
            found[i] = again if again.allowed or not tried[i].allowed else tried[i]
    return found


def _fitted(m: _Making, tried: list[_Tried]) -> Fit:
    """Judges the candidates; adds the engine that holds the budget where the best by time does not."""
    judge = m.judge
    assert judge is not None
    times = layer_times(tried[0].plan, tried[1].plan, m.layers)
    saved = {n: before - after for n, (before, after) in times.items()}
    last = tried[-1]
    fit = judge.fit(m.low(last.skip), saved, m.must)
    skip = last.skip | frozenset(fit.dropped)
    if fit.dropped and len(skip) < len(m.layers):
        tried.append(m.integers(f"int8 without {len(skip)} layers, within the budget", skip))
    for t in tried if m.must else tried[1:]:
        _judged(m, t)
    for _ in range(_ROUNDS_OF_FITTING):
        if tried[-1].allowed:
            break
        more = judge.harder(fit, tried[-1].skip, m.must)
        skip = tried[-1].skip | frozenset(more)
        if not more or len(skip) >= len(m.layers):
            break
        fit.dropped.update(dict.fromkeys(more, "the engine missed the budget that its emulation held; next in harm"))
        tried.append(m.integers(f"int8 without {len(skip)} layers, within the budget", skip))
        _judged(m, tried[-1])
    _say_budget(m, fit)
    return fit


def _judged(m: _Making, t: _Tried) -> None:
    """Sets the verdict on a candidate: of the engine itself, or of its emulation where the engine's shapes do not take the samples."""
    assert m.judge is not None
    verdict = m.judge.engine(t.plan, m.config)
    t.verdict, t.judged_on = (m.judge.low(m.low(t.skip)), "emulation") if verdict is None else (verdict, "engine")


def _say_budget(m: _Making, fit: Fit) -> None:
    """What became of the budget: a warning where it is missed, or was not judged."""
    assert m.judge is not None
    shown = fit.verdict.text if fit.verdict else "not judged"
    said = f"Accuracy: {m.judge.budget.text}; {shown}"
    if fit.dropped:
        named = "; ".join(f"'{n}': {why}" for n, why in list(fit.dropped.items())[:3])
        more = f"; and {len(fit.dropped) - 3} more" if len(fit.dropped) > 3 else ""
        said += f" with {len(fit.dropped)} of {len(m.layers)} layers kept out of INT8 ({named}{more})."
    else:
        said += ": nothing has to leave INT8 for it."
    (m.info if fit.verdict is not None and fit.verdict.holds else m.notes).append(said)


def _kept(m: _Making, tried: list[_Tried], times: list[list[float]]) -> EnginePlan:
    """The fastest that holds the budget; of those within the noise the one with the fewest integers (floating point, then the fewest layers)."""
    middle = [median(t) * 1e3 for t in times]
    spread = [(float(np.quantile(t, 0.75)) - float(np.quantile(t, 0.25))) * 500 for t in times]
    open_ = [i for i, t in enumerate(tried) if t.allowed] or [0]
    order = sorted(open_, key=lambda i: (i > 0, -len(tried[i].skip)))
    fastest = min(open_, key=lambda i: middle[i])
    best = middle[fastest]
    kept = next(i for i in order if middle[i] - best <= max(0.003 * best, min(spread[i], spread[fastest], 0.02 * best)))
    plan = tried[kept].plan
    plan.report["latency_ms"] = middle[kept]
    plan.report["precision_choice"] = [
        {
            "what": t.what, "ms": ms, "spread_ms": s, "kept": i == kept, "float_layers": sorted(t.skip),
            "accuracy": None if t.verdict is None else t.verdict.value, "holds": t.allowed,
            "build_seconds": t.plan.report["build_seconds"],
        }
        for i, (t, ms, s) in enumerate(zip(tried, middle, spread, strict=True))
    ]  # fmt: skip
    shown = ", ".join(f"{t.what} {ms:.3f} ms{'' if t.allowed else ' (outside the budget)'}" for t, ms in zip(tried, middle, strict=True))
    if not any(t.allowed for t in tried):
        m.notes.append(f"No engine holds the accuracy budget: {shown}. The first one is kept; the demands for INT8 or 16 bits leave no other.")
    elif tried[kept].plan.report.get("quantized") is None:
        m.notes.append(f"--int8 is permitted but does not pay here: {shown}. The engine computes in floating point.")
    elif kept == 0:
        m.notes.append(f"INT8 pays nowhere but where it is demanded: {shown}.")
    else:
        left = len(tried[kept].skip)
        floats = f"; {left} of {len(m.layers)} quantizable layers stay in floating point" if left else ""
        m.info.append(f"INT8 pays: {shown}{floats}.")
    plan.report["notes"] = [*plan.report.get("notes", []), *m.notes]
    plan.report["info"] = [*plan.report.get("info", []), *m.info]
    return plan
