"""The engines of a candidate: built, scored, timed in turns; a survivor's in INT8 also with trained ranges, and the better one kept."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

from whet.builder import BuildConfig, build, save_lock
from whet.engine import write_engine
from whet.engine.plan import EnginePlan
from whet.engine.schema import encode
from whet.frontends import network_from_onnx, save_onnx
from whet.network import Network
from whet.precision import Ranges, write_cache
from whet.pruning import count_params
from whet.search.jobs.environment import Stages, Worker
from whet.search.jobs.job import write_json
from whet.search.recipe.metrics import Score
from whet.search.stages.build_engine import build_config, engine_plan, predictor, quantized_source
from whet.search.stages.finetune import better
from whet.search.stages.measure import ready, time_engines
from whet.search.stages.prepare import Prepared, flops_of
from whet.search.stages.qat import loses_too_much, trained_for_int8, why_not

ENGINE, ONNX, QUANTIZED = "model.engine", "model.onnx", "model.int8.onnx"
LOCK, CALIBRATION, PRUNING = "lock.json", "calibration.json", "pruning.json"
ROUNDINGS = "roundings.json"  # what a training for INT8 rounded
_TRAINED = "trained.engine"

Feeds = dict[str, np.ndarray]


@dataclass
class Built:
    """An engine file, the network in floating point that it was built of, and what is known of it."""

    path: Path
    network: Network
    config: BuildConfig
    plan: EnginePlan
    seconds: float  # of building
    score: Score
    ranges: Ranges | None = None  # the trained ones, where the plan is of the network with Q/DQ in QUANTIZED
    times: dict[str, Any] = field(default_factory=dict)

    def save(self, folder: Path) -> None:
        """The networks, the lock and the ranges that build this engine again."""
        save_onnx(self.network, folder / ONNX)
        if self.ranges is not None:  # QUANTIZED is there: the engine was built from it
            write_cache(folder / CALIBRATION, self.ranges)
        else:
            (folder / QUANTIZED).unlink(missing_ok=True)
            source = quantized_source(self.network, self.config, self.plan)
            if source is not None:
                save_onnx(source, folder / QUANTIZED)
        save_lock(self.plan, folder / LOCK)


def first_engine(w: Worker, network: Network, calibration: Feeds, original: Network) -> Built:
    """The candidate's engine, scored; in INT8 and FP8 with calibrated ranges."""
    config = build_config(network, w.recipe, w.candidate, w.effort.level)
    with w.lock.timing():
        w.rest()
        w.say("building")
        plan, seconds = _written(w, ENGINE, lambda: engine_plan(network, config, calibration, w.folder, Stages(w)))
    return Built(w.folder / ENGINE, network, config, plan, seconds, _scored(w, w.folder / ENGINE, original))


def trained_engine(w: Worker, first: Built, made: Prepared, original: Network, reference: Score) -> tuple[Built | None, dict[str, Any] | None]:
    """The same candidate trained for INT8 where `first`, its calibrated engine, loses too much; and why, as plain data for the report.

    `reference` is the original's score. (None, None) for a candidate that is not in 8 bits.
    """
    if w.candidate.precision not in ("int8", "fp8"):
        return None, None
    why = why_not(w.recipe, w.candidate, first.plan)
    if why is not None:
        made.notes.append(f"not trained for {w.candidate.precision.upper()}: {why}")
        return None, None
    assert w.recipe.qat is not None
    sign = 1 if w.recipe.higher_is_better else -1
    lost = sign * (made.metric["value"] - first.score.value)
    dropped = sign * (reference.value - first.score.value)
    train, why = loses_too_much(w.recipe.qat, w.job.allowed, lost, dropped, reference.value)
    if not train:
        made.notes.append(f"not trained for INT8: {why}")
        return None, {"why": why, "kept": "calibrated", "calibrated": first.score.to_plain(), "trained": None}
    start = perf_counter()
    with w.lock.training():
        roundings = first.plan.report.quantized
        assert roundings is not None, "why_not refuses other engines"
        write_json(w.folder / ROUNDINGS, encode(roundings))
        got = trained_for_int8(made, original, roundings, first.config, w.recipe, w.candidate, w.folder, say=w.say)
    quantized = network_from_onnx(save_onnx(got.quantized, w.folder / QUANTIZED))  # what is deployed is what is built: a lock is of one file
    config = build_config(quantized, w.recipe, w.candidate, w.effort.level)
    with w.lock.timing():
        w.say("building")
        plan, seconds = _written(w, _TRAINED, lambda: build(quantized, config, progress=Stages(w)))
    score = _scored(w, w.folder / _TRAINED, original)
    about = {"why": why, "calibrated": first.score.to_plain(), "trained": score.to_plain(), "epochs": w.recipe.qat["epochs"],
             "seconds": perf_counter() - start, "resumed_at": got.resumed_at}  # fmt: skip
    about["kept"] = "trained" if better(score.value, first.score.value, w.recipe) else "calibrated"
    return Built(w.folder / _TRAINED, got.floating, config, plan, seconds, score, got.ranges), about


def keep(w: Worker, first: Built, trained: Built, qat: dict[str, Any], made: Prepared) -> Built:
    """The better of the two, in the place of the candidate's engine; both become steps of the report."""
    counts = {"params": count_params(first.network), "flops": flops_of(first.network)}
    word = "" if qat["kept"] == "trained" else " (not better, not used)"
    for name, e, seconds in (("calibrated for INT8", first, first.seconds), (f"trained for INT8{word}", trained, qat["seconds"])):
        made.steps.append({"step": name, **counts, "metric": e.score.to_plain(), "ms": e.times["median_ms"], "seconds": seconds})
    qat |= {"calibrated_ms": first.times["median_ms"], "trained_ms": trained.times["median_ms"]}
    if qat["kept"] == "calibrated":
        trained.path.unlink()
        return first
    os.replace(trained.path, first.path)
    trained.path = first.path
    return trained


def measured(w: Worker, engines: Sequence[Built], kept: Built, data: Feeds) -> dict[str, Any]:
    """Times of all engines compared with the original; memory and energy of the kept one."""
    with w.lock.timing():
        w.say("timing")
        loaded = [w.load(e.path) for e in engines]
        contexts = [e.create_context() for e in loaded]
        runs = [ready(c, data) for c in contexts]
        if w.job.reference:
            runs.insert(0, ready(w.load(Path(w.job.reference) / ENGINE).create_context(), data))
        rows, load = time_engines(runs, w.effort.seconds, w.backend())
        for e, row in zip(engines, rows[-len(engines) :], strict=True):
            e.times = row
        i, batch = engines.index(kept), w.candidate.batch
        spent = w.meter.of(runs[len(runs) - len(engines) + i], batch, w.energy_seconds)
    return {
        "latency": kept.times, "reference_ms": rows[0]["median_ms"], "throughput": 1e3 * batch / kept.times["mean_ms"],
        "memory_bytes": loaded[i].memory(contexts[i]).peak, "load": load, "energy": spent,
    }  # fmt: skip


def _written(w: Worker, name: str, make: Callable[[], EnginePlan]) -> tuple[EnginePlan, float]:
    """A plan in its file, and the seconds that it took."""
    start = perf_counter()
    plan = make()
    seconds = perf_counter() - start
    write_engine(plan, w.folder / name)
    return plan, seconds


def _scored(w: Worker, path: Path, original: Network) -> Score:
    with w.lock.working():
        w.say("scoring")
        return w.score(predictor(w.load(path).create_context()), original)
