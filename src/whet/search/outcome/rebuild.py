"""The engine of a deploy folder made again from the original model and its data: cut, recovered and trained anew, built under the folder's lock.

What was chosen (channels, branches, steps, roundings) stands in the folder's recipe.json; what was computed from data is computed again, in a
process like the search's own (workers.py), so that sums have the same order. The lock judges: other weights are another model for it.
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
from whet.builder.assemble import model_digest
from whet.builder.lock.lock import plan_digest
from whet.engine import write_engine
from whet.engine.report import recipe_from_data
from whet.errors import BuildError, LockError, UsageError
from whet.frontends import network_from_onnx, save_onnx
from whet.network import Network
from whet.pruning.recipe import recipe_from_json
from whet.report.stage import stage_of
from whet.search.jobs import job as j
from whet.search.jobs.environment import Worker
from whet.search.jobs.workers import workers_for
from whet.search.recipe.data import modules_of, unlabelled
from whet.search.recipe.fingerprint import SOURCES, contents
from whet.search.recipe.recipe import DEPLOYED, AutoRecipe, recipe_from
from whet.search.recipe.space import Candidate
from whet.search.stages.build_engine import again, build_config
from whet.search.stages.candidate_engines import ENGINE, LOCK, ONNX, PRUNING, QUANTIZED, ROUNDINGS
from whet.search.stages.finetune import FINETUNED, trained
from whet.search.stages.prepare import Prepared, prepared
from whet.search.stages.qat import trained_for_int8

RECIPE = "recipe.json"
_WORK, _POLL = "work", 0.05


@dataclass(frozen=True)
class Rebuilt:
    """The folder with the files made again (`model.onnx`, `model.engine`), and the engine's digest: that of the lock."""

    folder: Path
    digest: str
    seconds: float


def recipe_of_deploy(recipe: AutoRecipe, candidate: Candidate, source: Path) -> dict[str, Any]:
    """What recipe.json holds: the search's recipe, the chosen point, and what `rebuild` needs to make it again."""
    result = j.result_of(source) or {}
    by_training = (result.get("qat") or {}).get("kept") == "trained"
    return {
        "format": DEPLOYED, "version": 1, "recipe": recipe.to_plain(), "candidate": candidate.to_plain(), "pruning": j.read_json(source / PRUNING),
        "qat": result.get("qat"), "finetuned": any(s["step"] == FINETUNED for s in result.get("steps", ())),
        "roundings": j.read_json(source / ROUNDINGS) if by_training else None, "contents": contents(recipe), "made_by": f"whet {__version__}",
    }  # fmt: skip


def rebuild(
    deploy: str | os.PathLike[str], out: str | os.PathLike[str], *, project: str | os.PathLike[str] | None = None,
    progress: Callable[[str], None] | None = None,
) -> Rebuilt:  # fmt: skip
    """Makes the engine of a deploy folder again, into the new folder `out`. The Python form of `whet rebuild`.

    `project` is where the folder of the search's recipe lies now, if it was moved. Raises UsageError (no deploy folder, `out` in use, model or
    data gone or changed), BuildError where a step fails, LockError where it comes to another model or engine than the lock's.
    """
    deploy, out = Path(deploy).resolve(), Path(out).resolve()
    held = _held(deploy)
    recipe = _moved(held, project)
    _must_be_the_same(held, recipe)
    if out.exists() and (not out.is_dir() or [p.name for p in out.iterdir()] not in ([], [_WORK])):
        raise UsageError(f"{out} is there already: name a new folder with --out")
    shutil.rmtree(out / _WORK, ignore_errors=True)  # of a rebuild that was ended, or failed
    survivor = {k: v for k, v in dataclasses.asdict(recipe.survivor).items() if k != "count"}
    work = out / _WORK
    j.Job("rebuild", "rebuild", recipe.to_plain(), held["candidate"], effort=survivor, folders=[str(deploy)]).write(work)
    start = time.monotonic()
    result = _run(recipe, work, progress)
    if result["state"] != "done":
        raise BuildError(f"the engine could not be made again: {result['reason']}")
    for name in (ONNX, QUANTIZED, ENGINE):
        if (work / name).is_file():
            os.replace(work / name, out / name)
    if result["differs"] is not None:
        raise LockError(f"{result['differs']} The model made again is {out / ONNX}; the lock's engine comes from {deploy / result['model']}.")
    shutil.rmtree(work)
    return Rebuilt(out, result["digest"], time.monotonic() - start)


def _held(deploy: Path) -> dict[str, Any]:
    """recipe.json of a deploy folder. Raises UsageError."""
    found = j.read_json(deploy / RECIPE)
    if not isinstance(found, dict) or found.get("format") != DEPLOYED:
        raise UsageError(f"{deploy} is no deploy folder of whet auto: it has no {RECIPE} of one. Give the folder that a search left (deploy/).")
    if "contents" not in found:
        raise UsageError(f"{deploy / RECIPE} is of an older whet, which did not keep what a rebuild needs: let `whet auto` end once more (it writes "
                         "the folder again), or build from the folder's own model under its lock, as its README.md says.")  # fmt: skip
    return found


def _moved(held: Mapping[str, Any], project: str | os.PathLike[str] | None) -> AutoRecipe:
    """The recipe, its paths below the old project folder taken to be below `project`. Raises UsageError for a file that is not there."""
    plain = dict(held["recipe"])
    if project is not None:
        old, new = str(plain.get("folder", ".")), Path(project).resolve()
        if not new.is_dir():
            raise UsageError(f"--project={project}: there is no such folder")

        def at(path: Any) -> Any:
            below = isinstance(path, str) and not path.startswith("python:") and Path(path).is_relative_to(old)
            return str(new / Path(path).relative_to(old)) if below else path

        data = {k: at(v) if k in (*SOURCES, "preprocess") else v for k, v in plain["data"].items()}
        plain |= {"model": at(plain["model"]), "data": data, "folder": str(new)}
        plain.pop("out", None)
    try:
        return recipe_from(plain)
    except UsageError as e:
        where = f"The search was of files below {plain.get('folder')}: if they lie elsewhere now, name that folder with --project"
        raise UsageError(f"{e}. {where}") from None


def _must_be_the_same(held: Mapping[str, Any], recipe: AutoRecipe) -> None:
    """Raises UsageError naming what has other contents than the search had."""
    now = contents(recipe)
    needed = ["model", "data.calibrate", "data.preprocess", *(k for k in now if k.startswith("space.importance")), "data.train"]
    if changed := [k for k in needed if held["contents"].get(k) != now.get(k)]:
        raise UsageError(f"{', '.join(changed)}: the contents are not those that the search had, and other data give another engine. Bring back "
                         "what it had (--project names the folder), or search again.")  # fmt: skip


def _run(recipe: AutoRecipe, work: Path, progress: Callable[[str], None] | None) -> dict[str, Any]:
    """The job's result, from a process of its own."""
    with workers_for(recipe) as workers:
        workers.start(work)
        while not (ended := workers.finished()):
            if progress is not None:
                progress(stage_of(work))
            time.sleep(_POLL)
    (_, problem), *_ = ended
    return j.result_of(work) or {"state": "failed", "reason": problem}


# what the child does


def made_again(w: Worker) -> dict[str, Any]:
    """The job "rebuild": the network and, where it is the lock's model, the engine."""
    deploy = Path(w.job.folders[0])
    w.backend().key()  # PyTorch would otherwise load OpenMP first, with other waiting than the lock's machine has
    held = j.read_json(deploy / RECIPE)
    made, original = _prepared(w, held)
    if held["finetuned"]:
        with w.lock.training():
            made.network = trained(made.network, original, w.recipe, w.candidate, w.folder, say=w.say, notes=made.notes).network
    locked = ONNX
    if held["roundings"] is not None:
        with w.lock.training():
            config = build_config(made.network, w.recipe, w.candidate, w.effort.level)
            roundings = recipe_from_data(held["roundings"], "roundings")
            got = trained_for_int8(made, original, roundings, config, w.recipe, w.candidate, w.folder, say=w.say)
        made.network, locked = got.floating, QUANTIZED
        save_onnx(got.quantized, w.folder / QUANTIZED)
    save_onnx(made.network, w.folder / ONNX)
    net, was = network_from_onnx(w.folder / locked), network_from_onnx(deploy / locked)
    result: dict[str, Any] = {"state": "done", "role": w.job.role, "name": w.job.name, "model": locked, "differs": None, "digest": None}
    if model_digest(net) != model_digest(was):
        return result | {"differs": _difference(net, was, held)}
    config = dataclasses.replace(build_config(net, w.recipe, w.candidate, w.effort.level), lock=str(deploy / LOCK))
    with w.lock.timing():
        w.say("building")
        plan = again(net, config)
        write_engine(plan, w.folder / ENGINE)
    return result | {"digest": plan_digest(plan)}


def _prepared(w: Worker, held: Mapping[str, Any]) -> tuple[Prepared, Network]:
    """The candidate's network cut as it was and recovered anew, and the original."""
    with w.lock.working():
        w.say("reading")
        net = network_from_onnx(w.recipe.model)
        decided = recipe_from_json(held["pruning"]) if held["pruning"] is not None else None
        if decided is None and not w.candidate.two_four:
            return Prepared(net), net
        with modules_of(w.recipe.folder):
            data = unlabelled(w.recipe.data.calibrate, net, w.effort.samples, w.recipe.data.preprocess)
        return prepared(net, w.candidate, {}, data, w.effort, say=w.say, seed=w.recipe.search.seed, decided=decided), net


def _difference(made: Network, was: Network, held: Mapping[str, Any]) -> str:
    """What is another in the network made again, how much, and why that may be."""
    theirs = {name: t.array() for name, t in was.constants.items()}
    ours = {name: t.array() for name, t in made.constants.items()}
    if {n: a.shape for n, a in ours.items()} != {n: a.shape for n, a in theirs.items()}:
        return "The network made again has weights of other shapes than the lock's: the deploy folder is not of this model."
    away = {n: float(np.abs(ours[n].astype(np.float64) - a).max() / max(np.abs(a).max(), 1e-30)) for n, a in theirs.items() if a.size}
    other = {n: d for n, d in away.items() if d}
    what = "training" if held["finetuned"] or held["roundings"] is not None else "recovery"
    by = f" ({held['made_by']} made the folder, this is whet {__version__})" if held["made_by"] != f"whet {__version__}" else ""
    return (
        f"{len(other)} of {len(away)} weights made again differ from the lock's model, by at most {max(other.values(), default=0.0):.1g} of the "
        f"largest in each: {what} repeats its bits only on the same processor, number of threads and versions of libraries{by}. So the lock cannot "
        "hold."
    )
