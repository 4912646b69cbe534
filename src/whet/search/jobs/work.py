"""The work of a job in its child process: a candidate from model to measured engine, or the final interleaved comparison of all survivors."""

from __future__ import annotations

import os
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

from whet.engine import display_names
from whet.engine.plan import EnginePlan
from whet.frontends import network_from_file
from whet.inspector import layer_rows
from whet.network import Network
from whet.pruning import count_params, save_recipe
from whet.pruning.depth import branches
from whet.search.jobs.environment import Worker
from whet.search.jobs.job import Job, read_json
from whet.search.recipe.data import load_unlabelled
from whet.search.recipe.metrics import Score, drop
from whet.search.recipe.space import Candidate
from whet.search.stages.build_engine import build_config, build_quick_engine, make_predictor
from whet.search.stages.candidate_engines import (
    ENGINE,
    PRUNING,
    build_first_engine,
    build_step_engines,
    build_trained_engine,
    keep_better_engine,
    measure_engines,
)
from whet.search.stages.executor import find_executed_file, remove_engine
from whet.search.stages.finetune import fine_tune
from whet.search.stages.measure import make_run, time_engines
from whet.search.stages.prepare import Prepared, count_static_flops, fit_latency_budget, list_two_four_gains, prepare_candidate, write_two_four

SCORES = "scores.npy"
_CALIBRATE = 64  # samples for INT8 ranges


def run_job(job: Job, folder: Path) -> dict[str, Any]:
    """Runs a job and returns its result. Propagates errors of building, pruning, data and the metric."""
    w = Worker(job, folder)
    if job.role == "rebuild":
        from whet.search.outcome.rebuild import rebuild_job

        return rebuild_job(w)
    return _compare(w) if job.role == "final" else _run_candidate(w)


def _run_candidate(w: Worker) -> dict[str, Any]:
    """Takes a baseline, scout or survivor from the model to a measured engine."""
    recipe, c, job = w.recipe, w.candidate, w.job
    kept = job.kept
    with w.lock.hold_for_work():
        w.say("reading")
        net = network_from_file(recipe.model)
        data = load_unlabelled(recipe.data.calibrate, net, w.effort.samples, recipe.data.preprocess)
    if c.budget is not None and not kept and not c.removed:
        with w.lock.timing():
            w.say("distributing the latency budget")
            config = build_config(net, recipe, c, w.effort.level)
            kept, c = fit_latency_budget(net, c, config, recipe, data, say=w.say)
    with w.lock.hold_for_work():
        rate = None
        if job.role == "survivor":

            def rate(step: Network) -> dict[str, Any]:
                return w.score(make_predictor(build_quick_engine(step, recipe).create_context()), step).to_plain()

        pruned = prepare_candidate(net, c, kept, data, w.effort, say=w.say, rate=rate, seed=recipe.search.seed, steps=recipe.space.steps)
    if job.stop_above is not None and c.pruned and (stopped := _stop_early(w, pruned, net)) is not None:
        return stopped
    if c.two_four:
        with w.lock.timing():
            layers = list_two_four_gains(pruned.network, build_config(pruned.network, recipe, c, w.effort.level), w.say)
        with w.lock.hold_for_work():
            write_two_four(pruned, data, layers, say=w.say, rate=rate)
    if rate is not None:
        with w.lock.training():
            fine_tune(pruned, net, recipe, c, w.folder, say=w.say, rate=rate)
    calibrated = build_first_engine(w, pruned.network, {n: a[:_CALIBRATE] for n, a in data.items()}, net)
    original = _score_of(Path(job.reference)) if job.reference else calibrated.score
    trained, qat = build_trained_engine(w, calibrated, pruned, net, original) if job.role == "survivor" else (None, None)
    kept_engine = trained if trained is not None and qat is not None and qat["kept"] == "trained" else calibrated
    between = build_step_engines(w, pruned) if job.role == "survivor" else {}
    figures = measure_engines(w, [e for e in (calibrated, trained) if e is not None], kept_engine, data, pruned, between)
    if trained is not None and qat is not None:
        kept_engine = keep_better_engine(w, calibrated, trained, qat, pruned)
    plan, score, path = kept_engine.plan, kept_engine.score, kept_engine.path
    if score.each is not None:
        np.save(w.folder / SCORES, score.each)
    result = {
        "state": "done", "role": job.role, "name": job.name, "candidate": job.candidate, "kept": kept, "removed": list(c.removed),
        "metric": score.to_plain(), "drop": drop(original, score, recipe.higher_is_better),
        **figures, "engine_bytes": os.path.getsize(find_executed_file(path)), "build_seconds": kept_engine.seconds,
        "params": count_params(pruned.network), "flops": count_static_flops(pruned.network), "steps": pruned.steps, "qat": qat,
        "branches": _order_branches(w, net, data) if job.role == "baseline" and c == Candidate(batch=c.batch) else [],
        "notes": [*pruned.notes, *plan.report.notes, *plan.report.info], "precision": _count_precisions(plan), "layers": list_layers(plan),
    }  # fmt: skip
    if job.role == "scout":
        remove_engine(path)
    else:
        kept_engine.save(w.folder)
    if pruned.recipe is not None:
        save_recipe(pruned.recipe, w.folder / PRUNING)
    w.say("done")
    return result | {"stages": w.stages, "seconds": perf_counter() - w.started}


def _stop_early(w: Worker, pruned: Prepared, net: Network) -> dict[str, Any] | None:
    """The result of a scout that loses more than `stop_above` even at the lower end of the loss's interval; None if it goes on.

    Pruning, recovering and scoring take a sixth to a third of a trial (docs/results/pruning.md), building and timing the rest. Such a point cannot be
    chosen; its cost, for the sampler, is estimated by the share of the FLOPs.
    """
    job, recipe = w.job, w.recipe
    assert job.stop_above is not None
    with w.lock.hold_for_work():
        w.say("scoring")
        score = w.score(make_predictor(build_quick_engine(pruned.network, recipe).create_context()), pruned.network)
    before, after = count_static_flops(net), count_static_flops(pruned.network)
    if not job.reference or not before or after is None:
        return None
    lost = drop(_score_of(Path(job.reference)), score, recipe.higher_is_better)
    value = lost["value"]
    assert value is not None
    least = value if lost["low"] is None else lost["low"]
    if least <= job.stop_above:
        return None
    w.say("done")
    reason = f"loses {value:.3g} before its engine is built, {job.stop_above:.3g} at most are of interest (search.early_stop)"
    return {
        "state": "stopped", "role": job.role, "name": job.name, "candidate": job.candidate, "metric": score.to_plain(), "drop": lost,
        "flops_ratio": after / before, "reason": reason, "stages": w.stages, "seconds": perf_counter() - w.started,
    }  # fmt: skip


def _order_branches(w: Worker, net: Network, data: dict[str, np.ndarray]) -> list[str]:
    """Removable residual branches, sorted by the norm of the branch relative to its sum (mean over samples), ascending."""
    removable = branches(net)
    if not removable or not w.recipe.space.depth:
        return []
    layers = {layer.name: layer for layer in net.layers}
    ends = {b.name: (layers[b.name].inputs[b.place], layers[b.name].output) for b in removable}
    watched = net.clone()
    watched.outputs = []
    for name in dict.fromkeys(t.name for pair in ends.values() for t in pair if t is not None):
        watched.mark_output(watched.tensor(name))
    values = make_predictor(build_quick_engine(watched, w.recipe).create_context())(data)

    def share(name: str) -> float:
        pair = (values[t.name] for t in ends[name] if t is not None)
        branch, total = (np.linalg.norm(v.reshape(len(v), -1).astype(np.float64), axis=1) for v in pair)
        return float(np.mean(branch / np.maximum(total, 1e-30)))

    return sorted(ends, key=share)


def _compare(w: Worker) -> dict[str, Any]:
    """Times the engines of `folders` interleaved (the first is the original) and scores them on data.judge where given."""
    recipe, folders = w.recipe, [Path(p) for p in w.job.folders]
    which = w.last_data
    w.say("reading")
    net = network_from_file(recipe.model)
    data = load_unlabelled(recipe.data.calibrate, net, w.effort.samples, recipe.data.preprocess)
    engines = [w.load(p / ENGINE) for p in folders]
    contexts = [e.create_context() for e in engines]
    batches = [next((s[0] for s in c.input_shapes().values() if s), 1) for c in contexts]
    with w.lock.timing():
        w.measure_idle()
        w.say("timing")
        runs = [make_run(c, data) for c in contexts]
        times, load = time_engines(runs, w.effort.seconds, w.backend())
        spent = [w.meter.measure_energy(run, batch, w.energy_seconds) for run, batch in zip(runs, batches, strict=True)]
    rows: list[dict[str, Any]] = []
    first: Score | None = None
    with w.lock.hold_for_work():
        for k, (folder, context) in enumerate(zip(folders, contexts, strict=True)):
            w.say(f"scoring {k + 1}/{len(folders)}")
            score = w.score(make_predictor(context), net, which)
            first = first or score
            rows.append({
                "folder": folder.name, "metric": score.to_plain(), "drop": drop(first, score, recipe.higher_is_better), "latency": times[k],
                "throughput": 1e3 * batches[k] / times[k]["mean_ms"], "energy": spent[k], "memory_bytes": engines[k].memory(contexts[k]).peak,
                "engine_bytes": os.path.getsize(find_executed_file(folder / ENGINE)),
            })  # fmt: skip
    w.say("done")
    return {"state": "done", "role": "final", "name": w.job.name, "candidate": {}, "rows": rows, "load": load, "scored_on": which,
            "stages": w.stages, "seconds": perf_counter() - w.started}  # fmt: skip


def _score_of(folder: Path) -> Score:
    """Reads the score of a finished job."""
    metric = read_json(folder / "result.json")["metric"]
    each = np.load(folder / SCORES, allow_pickle=False) if (folder / SCORES).is_file() else None
    return Score(metric["value"], metric["low"], metric["high"], metric["samples"], each)


def _count_precisions(plan: EnginePlan) -> dict[str, int]:
    """Number of layers by the storage type of their first stored operand."""
    counts: dict[str, int] = {}
    for c in plan.choices.values():
        kind = next((o[1] for o in (*c.inputs, *c.outputs) if o is not None), "f32")
        counts[kind] = counts.get(kind, 0) + 1
    return counts


def list_layers(plan: EnginePlan) -> list[dict[str, Any]]:
    """The engine's layers for the report: name, source nodes, tactic, formats, time in ms measured by the builder."""
    times, names = plan.report.layer_ms, display_names(plan.network)
    shown = ("type", "tactic", "formats")
    return [
        {"name": names[layer.name], "sources": list(layer.sources), "ms": times.get(layer.name)} | {k: r[k] for k in shown}
        for layer, r in zip(plan.network.layers, layer_rows(plan), strict=True)
    ]
