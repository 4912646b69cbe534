"""What a job does, in its child process: prepare, build, score, time; and the last comparison of all survivors in turns."""

from __future__ import annotations

import os
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

from whet.backends import get_backend
from whet.builder import save_lock
from whet.engine import write_engine
from whet.engine.plan import EnginePlan
from whet.frontends import network_from_onnx, save_onnx
from whet.inspector import layer_rows
from whet.network import Network
from whet.pruning import count_params, save_recipe
from whet.pruning.depth import branches
from whet.registry import own_function
from whet.runtime import Engine, Runtime
from whet.search import _fields as f
from whet.search.build import build_config, engine_plan, predictor, quantized_source, quick_engine
from whet.search.data import Labelled, labelled, unlabelled
from whet.search.job import STAGE, Job, read_json
from whet.search.locks import DeviceLock, physical_gpu
from whet.search.measure import energy_of, in_turns, ready
from whet.search.metrics import Predict, Score, drop, top1, user_metric
from whet.search.prepare import flops_of, prepared, within_budget
from whet.search.recipe import Effort, recipe_from
from whet.search.space import Candidate
from whet.search.tune import fine_tuned

ENGINE, ONNX, QUANTIZED = "model.engine", "model.onnx", "model.int8.onnx"
PRUNING, CUTS, SCORES = "pruning.json", "lock.json", "scores.npy"
_CALIBRATE = 64  # samples that INT8 ranges come from
_ENERGY_SECONDS = {"cpu": 1.0, "cuda": 2.0}


class Worker:
    """A job's surroundings: recipe, model, data, device lock, and what it is busy with, for who watches."""

    def __init__(self, job: Job, folder: Path):
        self.job, self.folder = job, folder
        self.recipe = recipe_from(job.recipe)
        self.candidate = Candidate.from_plain(job.candidate)
        self.effort = f.read(Effort, job.effort, "effort") if job.effort else Effort()
        self.lock = DeviceLock(self.recipe.device)
        self.started = perf_counter()
        self.stages: dict[str, float] = {}
        self._stage, self._since = "", self.started
        self._data: dict[str, Labelled] = {}

    def say(self, what: str) -> None:
        """Notes what is done now (stage.txt), and how long each kind of work took."""
        now, kind = perf_counter(), what.split(" ")[0]
        if self._stage:
            self.stages[self._stage] = self.stages.get(self._stage, 0.0) + now - self._since
        self._stage, self._since = kind, now
        (self.folder / STAGE).write_text(what)

    def score(self, predict: Predict, net: Network, which: str = "score") -> Score:
        """The metric on `data.score` or `data.judge`."""
        if self.recipe.metric == "top1":
            source = getattr(self.recipe.data, which) or self.recipe.data.score
            assert source is not None
            if source not in self._data:
                self._data[source] = labelled(source, net, f"data.{which}")
            return top1(predict, self._data[source])
        return user_metric(own_function(self.recipe.metric, "metric"), predict, self.recipe.metric)

    def machine(self) -> Any:
        return get_backend(self.recipe.backend, threads=self.recipe.threads)


def run_job(job: Job, folder: Path) -> dict[str, Any]:
    """The result of a job. Raises what building, pruning, data and the metric raise."""
    w = Worker(job, folder)
    return _compare(w) if job.role == "final" else _candidate(w)


def _candidate(w: Worker) -> dict[str, Any]:
    """A baseline, scout or survivor: from the model to a measured engine."""
    recipe, c, job = w.recipe, w.candidate, w.job
    kept_files, kept = job.role != "scout", job.kept
    with w.lock.working():
        w.say("reading")
        net = network_from_onnx(recipe.model)
        data = unlabelled(recipe.data.calibrate, net, w.effort.samples, recipe.data.preprocess)
    if c.budget is not None and not kept and not c.removed:
        with w.lock.timing():
            w.say("sharing out")
            config = build_config(net, recipe, c, w.effort.level)
            kept, c = within_budget(net, c, config, recipe, data, say=w.say)
    with w.lock.working():
        rate = None
        if job.role == "survivor":

            def rate(step: Network) -> dict[str, Any]:
                return w.score(predictor(quick_engine(step, recipe).create_context()), step).to_plain()

        made = prepared(net, c, kept, data, w.effort, say=w.say, rate=rate, seed=recipe.search.seed)
    if rate is not None:
        with w.lock.training():
            fine_tuned(made, net, recipe, c, w.folder, say=w.say, rate=rate)
    calibration = {n: a[:_CALIBRATE] for n, a in data.items()}
    with w.lock.timing():
        w.say("building")
        start = perf_counter()
        plan = engine_plan(made.network, build_config(made.network, recipe, c, w.effort.level), calibration, w.folder, _Stages(w))
        build_seconds = perf_counter() - start
        write_engine(plan, w.folder / ENGINE)
        w.say("timing")
        measured = _measured(w, w.folder / ENGINE, data)
    with w.lock.working():
        w.say("scoring")
        engine = _load(w, w.folder / ENGINE)
        score = w.score(predictor(engine.create_context()), net)
    if score.each is not None:
        np.save(w.folder / SCORES, score.each)
    original = _score_of(Path(job.reference)) if job.reference else score
    result = {
        "state": "done", "role": job.role, "name": job.name, "candidate": job.candidate, "kept": kept, "removed": list(c.removed),
        "metric": score.to_plain(), "drop": drop(original, score, recipe.higher_is_better),
        **measured, "engine_bytes": os.path.getsize(w.folder / ENGINE), "build_seconds": build_seconds,
        "params": count_params(made.network), "flops": flops_of(made.network), "steps": made.steps,
        "branches": _branch_order(w, net, data) if job.role == "baseline" and c == Candidate(batch=c.batch) else [],
        "notes": [*made.notes, *plan.report.get("notes", []), *plan.report.get("info", [])], "precision": _precision(plan), "layers": layers_of(plan),
    }  # fmt: skip
    if kept_files:
        save_onnx(made.network, w.folder / ONNX)
        quantized = quantized_source(made.network, build_config(made.network, recipe, c, w.effort.level), plan, w.folder)
        if quantized is not None:
            save_onnx(quantized, w.folder / QUANTIZED)
        save_lock(plan, w.folder / CUTS)
    else:
        (w.folder / ENGINE).unlink()
    if made.recipe is not None:
        save_recipe(made.recipe, w.folder / PRUNING)
    w.say("done")
    return result | {"stages": w.stages, "seconds": perf_counter() - w.started}


def _branch_order(w: Worker, net: Network, data: dict[str, np.ndarray]) -> list[str]:
    """Residual branches that can be removed, those first that add least to what they are added to (norms on the data, mean over samples)."""
    found = branches(net)
    if not found or not w.recipe.space.depth:
        return []
    layers = {layer.name: layer for layer in net.layers}
    ends = {b.name: (layers[b.name].inputs[b.place], layers[b.name].output) for b in found}
    watched = net.clone()
    watched.outputs = []
    for name in dict.fromkeys(t.name for pair in ends.values() for t in pair if t is not None):
        watched.mark_output(watched.tensor(name))
    got = predictor(quick_engine(watched, w.recipe).create_context())(data)

    def share(name: str) -> float:
        branch, total = (np.linalg.norm(got[t.name].reshape(len(got[t.name]), -1).astype(np.float64), axis=1) for t in ends[name] if t is not None)
        return float(np.mean(branch / np.maximum(total, 1e-30)))

    return sorted(ends, key=share)


def _measured(w: Worker, path: Path, data: dict[str, np.ndarray]) -> dict[str, Any]:
    """Times in turns with the original, memory and energy."""
    engine = _load(w, path)
    context = engine.create_context()
    runs = [ready(context, data)]
    if w.job.reference:
        other = _load(w, Path(w.job.reference) / ENGINE).create_context()
        runs.insert(0, ready(other, data))
    machine = w.machine()
    rows, load = in_turns(runs, w.effort.seconds, machine)
    batch = w.candidate.batch
    return {
        "latency": rows[-1], "reference_ms": rows[0]["median_ms"], "throughput": 1e3 * batch / rows[-1]["mean_ms"],
        "memory_bytes": engine.memory(context).peak, "load": load, "energy": _energy(w, runs[-1], batch),
    }  # fmt: skip


def _energy(w: Worker, run: Any, batch: int) -> dict[str, Any]:
    seconds = _ENERGY_SECONDS.get(w.recipe.backend, 1.0)
    return energy_of(run, physical_gpu(w.recipe.device), batch, min(seconds, 4 * w.effort.seconds))


def _compare(w: Worker) -> dict[str, Any]:
    """Engines of `folders` in turns (the first is the original), and scored on data that the search has not seen where there are such."""
    recipe, folders = w.recipe, [Path(p) for p in w.job.folders]
    which = "judge" if recipe.data.judge else "score"
    w.say("reading")
    net = network_from_onnx(recipe.model)
    data = unlabelled(recipe.data.calibrate, net, w.effort.samples, recipe.data.preprocess)
    engines = [_load(w, p / ENGINE) for p in folders]
    contexts = [e.create_context() for e in engines]
    batches = [next((s[0] for s in c.input_shapes().values() if s), 1) for c in contexts]
    with w.lock.timing():
        w.say("timing")
        runs = [ready(c, data) for c in contexts]
        times, load = in_turns(runs, w.effort.seconds, w.machine())
        spent = [_energy(w, run, batch) for run, batch in zip(runs, batches, strict=True)]
    rows: list[dict[str, Any]] = []
    first: Score | None = None
    with w.lock.working():
        for k, (folder, context) in enumerate(zip(folders, contexts, strict=True)):
            w.say(f"scoring {k + 1}/{len(folders)}")
            score = w.score(predictor(context), net, which)
            first = first or score
            rows.append({
                "folder": folder.name, "metric": score.to_plain(), "drop": drop(first, score, recipe.higher_is_better), "latency": times[k],
                "throughput": 1e3 * batches[k] / times[k]["mean_ms"], "energy": spent[k], "memory_bytes": engines[k].memory(contexts[k]).peak,
                "engine_bytes": os.path.getsize(folder / ENGINE),
            })  # fmt: skip
    w.say("done")
    return {"state": "done", "role": "final", "name": w.job.name, "candidate": {}, "rows": rows, "load": load, "scored_on": which,
            "stages": w.stages, "seconds": perf_counter() - w.started}  # fmt: skip


def _load(w: Worker, path: Path) -> Engine:
    return Runtime(backend=w.recipe.backend, threads=w.recipe.threads).load(path)


def _score_of(folder: Path) -> Score:
    """The score of a finished job."""
    found = read_json(folder / "result.json")["metric"]
    each = np.load(folder / SCORES, allow_pickle=False) if (folder / SCORES).is_file() else None
    return Score(found["value"], found["low"], found["high"], found["samples"], each)


def _precision(plan: EnginePlan) -> dict[str, int]:
    """Layers by the type that their first stored operand has."""
    found: dict[str, int] = {}
    for c in plan.choices.values():
        kind = next((o[1] for o in (*c.inputs, *c.outputs) if o is not None), "f32")
        found[kind] = found.get(kind, 0) + 1
    return found


def layers_of(plan: EnginePlan) -> list[dict[str, Any]]:
    """The engine's layers for the report: name, source nodes, tactic, formats, ms as timed in the build."""
    times = plan.report.get("layer_ms", {})
    shown = ("type", "tactic", "formats")
    return [
        {"name": r["layer"], "sources": list(layer.sources), "ms": times.get(layer.name)} | {k: r[k] for k in shown}
        for layer, r in zip(plan.network.layers, layer_rows(plan), strict=True)
    ]


class _Stages:
    """A builder's progress, told as the stage of the job."""

    def __init__(self, w: Worker):
        self.w, self.name, self.total, self.done, self.last = w, "", 1, 0, 0.0

    def stage(self, name: str, total: int) -> None:
        self.name, self.total, self.done = name, total, 0

    def step(self, what: str, done: int = 1) -> None:
        self.done += done
        if perf_counter() - self.last > 0.2:
            self.last = perf_counter()
            self.w.say(f"building {self.name} {self.done}{f'/{self.total}' if self.total else ''}")

    def note(self, text: str) -> None:
        """Notes stand in the plan's report."""


