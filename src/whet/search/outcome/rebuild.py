"""Rebuilds the engine of a deploy folder from the original model and its data: pruned, recovered, trained, built under the folder's lock.

Decisions (channels, branches, steps, quantization sites) are read from the folder's recipe.json; values computed from data are recomputed in a
process like the search's (workers.py), so that sums have the same order. The lock refuses a model with other weights.
"""

from __future__ import annotations

import dataclasses
import os
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from whet import __version__
from whet.builder.assemble import compute_model_digest
from whet.builder.lock.lock import plan_digest
from whet.engine import write_engine
from whet.engine.report import decode_recipe
from whet.errors import BuildError, LockError, UsageError
from whet.files import resolve_path
from whet.frontends import network_from_file, network_from_onnx, save_onnx
from whet.network import Network
from whet.pruning.recipe import parse_recipe
from whet.report.stage import find_stage
from whet.search.jobs import job as j
from whet.search.jobs.environment import Worker
from whet.search.jobs.workers import make_workers
from whet.search.recipe.data import allow_imports_from, load_unlabelled
from whet.search.recipe.fingerprint import SOURCES, digest_contents
from whet.search.recipe.recipe import DEPLOYED, AutoRecipe, recipe_from
from whet.search.recipe.space import Candidate
from whet.search.stages.build_engine import build_config, rebuild_plan
from whet.search.stages.candidate_engines import ENGINE, LOCK, ONNX, PRUNING, QUANTIZED, ROUNDINGS
from whet.search.stages.finetune import FINETUNED, train_network
from whet.search.stages.prepare import TWO_FOUR, Prepared, prepare_candidate, write_two_four
from whet.search.stages.qat import train_for_int8

RECIPE = "recipe.json"
_WORK, _POLL = "work", 0.05


@dataclass(frozen=True)
class Rebuilt:
    """The folder with the rebuilt files (`model.onnx`, `model.engine`) and the engine's digest, equal to the lock's."""

    folder: Path
    digest: str
    seconds: float


def make_deploy_recipe(recipe: AutoRecipe, candidate: Candidate, source: Path) -> dict[str, Any]:
    """Contents of recipe.json: the search's recipe, the chosen point, and the data that `rebuild` needs."""
    result = j.read_result(source) or {}
    by_training = (result.get("qat") or {}).get("kept") == "trained"
    return {
        "format": DEPLOYED, "version": 1, "recipe": recipe.to_plain(), "candidate": candidate.to_plain(), "pruning": j.read_json(source / PRUNING),
        "qat": result.get("qat"), "finetuned": any(s["step"] == FINETUNED for s in result.get("steps", ())),
        "roundings": j.read_json(source / ROUNDINGS) if by_training else None, "contents": digest_contents(recipe), "made_by": f"whet {__version__}",
    }  # fmt: skip


def rebuild(
    deploy: str | os.PathLike[str], out: str | os.PathLike[str], *, project: str | os.PathLike[str] | None = None,
    progress: Callable[[str], None] | None = None,
) -> Rebuilt:  # fmt: skip
    """Rebuilds the engine of a deploy folder into the new folder `out`. The Python form of `whet rebuild`.

    `project` is the new location of the search recipe's folder, if it was moved. Raises UsageError (no deploy folder, `out` in use, model or
    data missing or changed), BuildError if a step fails, LockError if the model or engine differs from the lock's.
    """
    deploy, out = resolve_path(deploy), resolve_path(out)
    stored = _read_deploy(deploy)
    recipe = _relocate_paths(stored, project)
    _require_same_sources(stored, recipe)
    if out.exists() and (not out.is_dir() or [p.name for p in out.iterdir()] not in ([], [_WORK])):
        raise UsageError(f"{out} exists already: give a new folder with --out")
    shutil.rmtree(out / _WORK, ignore_errors=True)  # left by an interrupted or failed rebuild
    survivor = {k: v for k, v in dataclasses.asdict(recipe.survivor).items() if k != "count"}
    work = out / _WORK
    j.Job("rebuild", "rebuild", recipe.to_plain(), stored["candidate"], effort=survivor, folders=[str(deploy)]).write(work)
    start = time.monotonic()
    result = _run(recipe, work, progress)
    if result["state"] != "done":
        raise BuildError(f"the engine could not be rebuilt: {result['reason']}")
    for name in (ONNX, QUANTIZED, ENGINE):
        if (work / name).is_file():
            os.replace(work / name, out / name)
    if result["differs"] is not None:
        raise LockError(f"{result['differs']} The rebuilt model is {out / ONNX}; the lock's engine comes from {deploy / result['model']}.")
    shutil.rmtree(work)
    return Rebuilt(out, result["digest"], time.monotonic() - start)


def _read_deploy(deploy: Path) -> dict[str, Any]:
    """Reads recipe.json of a deploy folder. Raises UsageError."""
    data = j.read_json(deploy / RECIPE)
    if not isinstance(data, dict) or data.get("format") != DEPLOYED:
        raise UsageError(f"{deploy} is not a deploy folder of whet auto: it has no {RECIPE} of one. Give the deploy/ folder of a search.")
    if "contents" not in data:
        raise UsageError(f"{deploy / RECIPE} was written by an older whet without the data for a rebuild: run `whet auto` again (it rewrites the "
                         "folder), or build from the folder's model under its lock, as described in its README.md.")  # fmt: skip
    return data


def _relocate_paths(stored: Mapping[str, Any], project: str | os.PathLike[str] | None) -> AutoRecipe:
    """The recipe with paths below the old project folder moved to `project`. Raises UsageError for a missing file."""
    plain = dict(stored["recipe"])
    if project is not None:
        old, new = str(plain.get("folder", ".")), Path(project).resolve()
        if not new.is_dir():
            raise UsageError(f"--project={project}: no such folder")

        def relocate(path: Any) -> Any:
            below = isinstance(path, str) and not path.startswith("python:") and Path(path).is_relative_to(old)
            return str(new / Path(path).relative_to(old)) if below else path

        data = {k: relocate(v) if k in (*SOURCES, "preprocess") else v for k, v in plain["data"].items()}
        plain |= {"model": relocate(plain["model"]), "data": data, "folder": str(new)}
        plain.pop("out", None)
    try:
        return recipe_from(plain)
    except UsageError as e:
        where = f"The search used files below {plain.get('folder')}: if they were moved, give the new folder with --project"
        raise UsageError(f"{e}. {where}") from None


def _require_same_sources(stored: Mapping[str, Any], recipe: AutoRecipe) -> None:
    """Raises UsageError naming sources whose contents changed since the search."""
    now = digest_contents(recipe)
    needed = ["model", "data.calibrate", "data.preprocess", *(k for k in now if k.startswith("space.importance")), "data.train"]
    if changed := [k for k in needed if stored["contents"].get(k) != now.get(k)]:
        raise UsageError(f"{', '.join(changed)}: the contents changed since the search, and other data give another engine. Restore the "
                         "original contents (--project gives the folder), or search again.")  # fmt: skip


def _run(recipe: AutoRecipe, work: Path, progress: Callable[[str], None] | None) -> dict[str, Any]:
    """Runs the job in a child process and returns its result."""
    with make_workers(recipe) as workers:
        workers.start(work)
        while not (ended := workers.collect_finished()):
            if progress is not None:
                progress(find_stage(work))
            time.sleep(_POLL)
    (_, problem), *_ = ended
    return j.read_result(work) or {"state": "failed", "reason": problem}


# in the child process


def rebuild_job(w: Worker) -> dict[str, Any]:
    """The job "rebuild": the network and, if it is the lock's model, the engine."""
    deploy = Path(w.job.folders[0])
    w.backend().key()  # otherwise PyTorch loads OpenMP first, with another wait policy than in the search
    stored = j.read_json(deploy / RECIPE)
    pruned, original = _prepare(w, stored)
    if stored["finetuned"]:
        with w.lock.training():
            pruned.network = train_network(pruned.network, original, w.recipe, w.candidate, w.folder, say=w.say, notes=pruned.notes).network
    locked = ONNX
    if stored["roundings"] is not None:
        with w.lock.training():
            config = build_config(pruned.network, w.recipe, w.candidate, w.effort.level)
            roundings = decode_recipe(stored["roundings"], "roundings")
            qat = train_for_int8(pruned, original, roundings, config, w.recipe, w.candidate, w.folder, say=w.say)
        pruned.network, locked = qat.floating, QUANTIZED
        save_onnx(qat.quantized, w.folder / QUANTIZED)
    save_onnx(pruned.network, w.folder / ONNX)
    net, locked_net = network_from_onnx(w.folder / locked), network_from_onnx(deploy / locked)
    result: dict[str, Any] = {"state": "done", "role": w.job.role, "name": w.job.name, "model": locked, "differs": None, "digest": None}
    if compute_model_digest(net) != compute_model_digest(locked_net):
        return result | {"differs": _describe_difference(net, locked_net, stored)}
    config = dataclasses.replace(build_config(net, w.recipe, w.candidate, w.effort.level), lock=str(deploy / LOCK))
    with w.lock.timing():
        w.say("building")
        plan = rebuild_plan(net, config)
        write_engine(plan, w.folder / ENGINE)
    return result | {"digest": plan_digest(plan)}


def _prepare(w: Worker, stored: Mapping[str, Any]) -> tuple[Prepared, Network]:
    """The candidate's network, pruned as recorded and recovered again, and the original."""
    with w.lock.hold_for_work():
        w.say("reading")
        net = network_from_file(w.recipe.model)
        decided = parse_recipe(stored["pruning"]) if stored["pruning"] is not None else None
        if decided is None and not w.candidate.two_four:
            return Prepared(net), net
        with allow_imports_from(w.recipe.folder):
            data = load_unlabelled(w.recipe.data.calibrate, net, w.effort.samples, w.recipe.data.preprocess)
        prepared = prepare_candidate(net, w.candidate, {}, data, w.effort, say=w.say, seed=w.recipe.search.seed, decided=decided)
        if w.candidate.two_four:
            write_two_four(prepared, data, decided.about.get(TWO_FOUR, ()) if decided is not None else (), say=w.say)
        return prepared, net


def _describe_difference(rebuilt: Network, locked: Network, stored: Mapping[str, Any]) -> str:
    """Describes how the rebuilt network differs from the lock's model, and the likely cause."""
    expected = {name: t.array() for name, t in locked.constants.items()}
    actual = {name: t.array() for name, t in rebuilt.constants.items()}
    if {n: a.shape for n, a in actual.items()} != {n: a.shape for n, a in expected.items()}:
        return "The rebuilt network has weights of other shapes than the lock's: the deploy folder belongs to another model."
    deviations = {n: float(np.abs(actual[n].astype(np.float64) - a).max() / max(np.abs(a).max(), 1e-30)) for n, a in expected.items() if a.size}
    changed = {n: d for n, d in deviations.items() if d}
    step = "training" if stored["finetuned"] or stored["roundings"] is not None else "recovery"
    by = f" ({stored['made_by']} wrote the folder, this is whet {__version__})" if stored["made_by"] != f"whet {__version__}" else ""
    return (
        f"{len(changed)} of {len(deviations)} rebuilt weights differ from the lock's model, by at most {max(changed.values(), default=0.0):.1g} of "
        f"the largest in each: {step} is bit-identical only on the same processor with the same threads and library versions{by}. So the lock does "
        "not apply."
    )
