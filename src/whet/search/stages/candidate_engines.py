"""Builds, scores and times a candidate's engines; an INT8 survivor is also built with trained ranges, and the better engine is kept."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

from whet.builder import BuildConfig, save_lock
from whet.builder.build import build
from whet.engine import write_engine
from whet.engine.plan import EnginePlan
from whet.engine.schema import encode
from whet.errors import WhetError
from whet.frontends import network_from_onnx, save_onnx
from whet.network import Network
from whet.precision import Ranges, write_cache
from whet.pruning import count_params
from whet.search.jobs.environment import Stages, Worker
from whet.search.jobs.job import write_json
from whet.search.recipe.metrics import Score
from whet.search.stages.build_engine import build_config, build_engine_plan, find_quantized_source, make_predictor
from whet.search.stages.executor import move_engine, remove_engine, write_tensorrt_plan
from whet.search.stages.finetune import is_better
from whet.search.stages.measure import make_run, time_engines
from whet.search.stages.prepare import Prepared, count_static_flops
from whet.search.stages.qat import decide_int8_training, explain_skip, train_for_int8

ENGINE, ONNX, QUANTIZED = "model.engine", "model.onnx", "model.int8.onnx"
LOCK, CALIBRATION, PRUNING = "lock.json", "calibration.json", "pruning.json"
ROUNDINGS = "roundings.json"  # quantization sites of INT8 training
_TRAINED = "trained.engine"

Feeds = dict[str, np.ndarray]


@dataclass
class ScoredEngine:
    """An engine file with its floating-point network, score and build data."""

    path: Path
    network: Network
    config: BuildConfig
    plan: EnginePlan
    seconds: float  # build time
    score: Score
    ranges: Ranges | None = None  # trained ranges, if the plan was built from the Q/DQ network in QUANTIZED
    times: dict[str, Any] = field(default_factory=dict)

    def save(self, folder: Path) -> None:
        """Writes the networks, the lock and the ranges needed to rebuild this engine."""
        save_onnx(self.network, folder / ONNX)
        if self.ranges is not None:  # QUANTIZED exists: the engine was built from it
            write_cache(folder / CALIBRATION, self.ranges)
        else:
            (folder / QUANTIZED).unlink(missing_ok=True)
            source = find_quantized_source(self.network, self.config, self.plan)
            if source is not None:
                save_onnx(source, folder / QUANTIZED)
        save_lock(self.plan, folder / LOCK)


def build_first_engine(w: Worker, network: Network, calibration: Feeds, original: Network) -> ScoredEngine:
    """Builds and scores the candidate's engine; in INT8 and FP8 with calibrated ranges."""
    config = build_config(network, w.recipe, w.candidate, w.effort.level)
    with w.lock.timing():
        w.measure_idle()
        w.say("building")
        plan, seconds = _build_and_write(w, ENGINE, network, config, lambda: build_engine_plan(network, config, calibration, w.folder, Stages(w)))
    return ScoredEngine(w.folder / ENGINE, network, config, plan, seconds, _score(w, w.folder / ENGINE, original))


def build_trained_engine(
    w: Worker, first: ScoredEngine, prepared: Prepared, original: Network, reference: Score
) -> tuple[ScoredEngine | None, dict[str, Any] | None]:
    """Trains the candidate for INT8 if `first`, its calibrated engine, loses too much; returns the engine and report data with the reason.

    `reference` is the original's score. (None, None) for a candidate without 8-bit precision.
    """
    if w.candidate.precision not in ("int8", "fp8"):
        return None, None
    why = explain_skip(w.recipe, w.candidate, first.plan)
    if why is not None:
        prepared.notes.append(f"not trained for {w.candidate.precision.upper()}: {why}")
        return None, None
    assert w.recipe.qat is not None
    sign = 1 if w.recipe.higher_is_better else -1
    lost = sign * (prepared.metric["value"] - first.score.value)
    dropped = sign * (reference.value - first.score.value)
    train, why = decide_int8_training(w.recipe.qat, w.job.allowed, lost, dropped, reference.value)
    if not train:
        prepared.notes.append(f"not trained for INT8: {why}")
        return None, {"why": why, "kept": "calibrated", "calibrated": first.score.to_plain(), "trained": None}
    start = perf_counter()
    with w.lock.training():
        roundings = first.plan.report.quantized
        assert roundings is not None, "why_not refuses other engines"
        write_json(w.folder / ROUNDINGS, encode(roundings))
        trained = train_for_int8(prepared, original, roundings, first.config, w.recipe, w.candidate, w.folder, say=w.say)
    quantized = network_from_onnx(save_onnx(trained.quantized, w.folder / QUANTIZED))  # from the deployed file: a lock belongs to one file
    config = build_config(quantized, w.recipe, w.candidate, w.effort.level)
    with w.lock.timing():
        w.say("building")
        plan, seconds = _build_and_write(w, _TRAINED, quantized, config, lambda: build(quantized, config, progress=Stages(w)))
    score = _score(w, w.folder / _TRAINED, original)
    report = {"why": why, "calibrated": first.score.to_plain(), "trained": score.to_plain(), "epochs": w.recipe.qat["epochs"],
             "seconds": perf_counter() - start, "resumed_at": trained.resumed_at}  # fmt: skip
    report["kept"] = "trained" if is_better(score.value, first.score.value, w.recipe) else "calibrated"
    return ScoredEngine(w.folder / _TRAINED, trained.floating, config, plan, seconds, score, trained.ranges), report


def keep_better_engine(w: Worker, first: ScoredEngine, trained: ScoredEngine, qat: dict[str, Any], prepared: Prepared) -> ScoredEngine:
    """Keeps the better engine as the candidate's engine; both become steps of the report."""
    counts = {"params": count_params(first.network), "flops": count_static_flops(first.network)}
    word = "" if qat["kept"] == "trained" else " (not better, not used)"
    for name, e, seconds in (("calibrated for INT8", first, first.seconds), (f"trained for INT8{word}", trained, qat["seconds"])):
        prepared.steps.append({"step": name, **counts, "metric": e.score.to_plain(), "ms": e.times["median_ms"], "seconds": seconds})
    qat |= {"calibrated_ms": first.times["median_ms"], "trained_ms": trained.times["median_ms"]}
    if qat["kept"] == "calibrated":
        remove_engine(trained.path)
        return first
    move_engine(trained.path, first.path)
    trained.path = first.path
    return trained


def build_step_engines(w: Worker, prepared: Prepared) -> dict[int, Path]:
    """Builds the FP32 engine of each network between the steps; returns the files by the index of the step.

    The last network of an FP32 candidate has none: the candidate's own engine computes it. A network that cannot be built is noted.
    """
    candidate = replace(w.candidate, precision="fp32")
    built = {}
    for i, network in prepared.variants.items():
        if i == max(prepared.variants) and candidate == w.candidate:
            continue
        config = build_config(network, w.recipe, candidate, w.effort.level)
        with w.lock.timing():
            w.say("building")
            try:
                _build_and_write(w, f"step{i}.engine", network, config, partial(build, network, config, progress=Stages(w)))
            except WhetError as e:
                prepared.notes.append(f"no time of the step '{prepared.steps[i]['step']}': {e}")
                continue
        built[i] = w.folder / f"step{i}.engine"
    return built


def write_step_times(prepared: Prepared, ms: Mapping[int, float]) -> None:
    """Writes `ms`, the times by the index of a step, into the steps; one that changes neither shapes nor sparsity has the time of the step before."""
    last = None
    for i, step in enumerate(prepared.steps):
        last = ms.get(i, None if i in prepared.variants else last)
        if last is not None:
            step["ms"] = last


def measure_engines(
    w: Worker, engines: Sequence[ScoredEngine], selected: ScoredEngine, data: Feeds, prepared: Prepared, steps: Mapping[int, Path]
) -> dict[str, Any]:
    """Times all engines against the original, those of `prepared`'s steps too; measures memory and energy of the kept one."""
    with w.lock.timing():
        w.say("timing")
        loaded = [w.load(e.path) for e in engines]
        contexts = [e.create_context() for e in loaded]
        runs = [make_run(c, data) for c in contexts]
        if w.job.reference:
            runs.insert(0, make_run(w.load(Path(w.job.reference) / ENGINE).create_context(), data))
        first = len(runs) - len(engines)
        runs += [make_run(w.load(path).create_context(), data) for path in steps.values()]
        rows, load = time_engines(runs, w.effort.seconds, w.backend())
        for e, row in zip(engines, rows[first : first + len(engines)], strict=True):
            e.times = row
        i, batch = engines.index(selected), w.candidate.batch
        spent = w.meter.measure_energy(runs[first + i], batch, w.energy_seconds)
    ms = {j: row["median_ms"] for j, row in zip(steps, rows[first + len(engines) :], strict=True)}
    if w.candidate.precision == "fp32" and prepared.variants:
        ms[max(prepared.variants)] = selected.times["median_ms"]
    if w.job.reference:
        ms[0] = rows[0]["median_ms"]
    write_step_times(prepared, ms)
    for path in steps.values():
        remove_engine(path)
    return {
        "latency": selected.times, "reference_ms": rows[0]["median_ms"], "throughput": 1e3 * batch / selected.times["mean_ms"],
        "memory_bytes": loaded[i].memory(contexts[i]).peak, "load": load, "energy": spent,
    }  # fmt: skip


def _build_and_write(w: Worker, name: str, network: Network, config: BuildConfig, make: Callable[[], EnginePlan]) -> tuple[EnginePlan, float]:
    """Builds the plan of `network` and writes its file, and TensorRT's plan if that is the executor; returns the plan and whet's seconds."""
    start = perf_counter()
    plan = make()
    seconds = perf_counter() - start
    write_engine(plan, w.folder / name)
    if w.recipe.executor == "tensorrt":
        w.say("building with TensorRT")
        write_tensorrt_plan(w.folder / name, network, config, plan)
    return plan, seconds


def _score(w: Worker, path: Path, original: Network) -> Score:
    with w.lock.hold_for_work():
        w.say("scoring")
        return w.score(make_predictor(w.load(path).create_context()), original)
