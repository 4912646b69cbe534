"""The deploy folder: the engine, the model as ONNX, how it was pruned, the lock, the report, and how to run it. It appears whole."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

from whet.builder import BuildConfig
from whet.builder.lock.lock import plan_digest
from whet.engine import read_engine
from whet.errors import WhetError
from whet.report import search_page
from whet.search.jobs import job as j
from whet.search.outcome.rebuild import RECIPE, recipe_of_deploy
from whet.search.outcome.result import SearchResult
from whet.search.outcome.summary import summary
from whet.search.recipe.space import Candidate
from whet.search.stages.build_engine import again, build_config
from whet.search.stages.candidate_engines import CALIBRATION, ENGINE, LOCK, ONNX, PRUNING, QUANTIZED
from whet.search.stages.finetune import FINETUNED

PAGE, DATA, README = "report.html", "report.json", "README.md"


def write_deploy(found: SearchResult) -> dict[str, Any]:
    """Writes the folder beside the old one and swaps them; returns the summary that report.json holds."""
    folder = found.folder
    name = found.final["rows"][found.chosen]["folder"]
    source = folder.path / ("baselines" if "-b" in name else "survivors") / name
    new, old = folder.path / "deploy.new", folder.path / "deploy.old"
    for leftover in (new, old):
        shutil.rmtree(leftover, ignore_errors=True)
    new.mkdir()
    for file in (ENGINE, ONNX, QUANTIZED, PRUNING, CALIBRATION, LOCK):
        if (source / file).is_file():
            shutil.copyfile(source / file, new / file)
    made = summary(found)
    made["commands"] = commands(found, source)
    j.write_json(new / RECIPE, recipe_of_deploy(found.recipe, _candidate(source), source))
    j.write_json(new / DATA, made)
    (new / PAGE).write_text(search_page(made), encoding="utf-8")
    (new / README).write_text(_readme(found, made, source, new), encoding="utf-8")
    if folder.deploy.exists():
        os.replace(folder.deploy, old)
    os.replace(new, folder.deploy)
    shutil.rmtree(old, ignore_errors=True)
    return made


def _candidate(source: Path) -> Candidate:
    return Candidate.from_plain((j.result_of(source) or {})["candidate"])


def commands(found: SearchResult, source: Path) -> list[str]:
    """How to run the engine, look into it, and build it again under its lock: from the deployed model, and from the original one."""
    flags = build_flags(found, source)
    model = locked_model(source)
    return [
        f"whet exec --loadEngine={ENGINE}",
        f"whet explain {ENGINE}",
        " ".join([f"whet exec --onnx={model}", *flags, f"--lock={LOCK}", f"--saveEngine=again.engine  # the same engine, from {model}"]),
        f"whet rebuild .  # the same engine from the original model and its data: {_made_of(source)}, then built under {LOCK}",
    ]


def _made_of(source: Path) -> str:
    """What `whet rebuild` does anew, in words."""
    held = j.result_of(source) or {}
    steps = ["cut and recovered"] if (source / PRUNING).is_file() else []
    steps += ["2:4 written"] if held["candidate"]["two_four"] else []
    steps += ["fine-tuned"] if any(s["step"] == FINETUNED for s in held["steps"]) else []
    steps += ["trained for INT8"] if locked_model(source) == QUANTIZED else []
    return ", ".join(steps) or "nothing was cut"


def locked_model(source: Path) -> str:
    """Which of the networks the lock is of: the one with trained ranges, else the floating-point one (calibrated ranges are in the lock)."""
    qat = (j.result_of(source) or {}).get("qat")
    return QUANTIZED if qat and qat["kept"] == "trained" else ONNX


def build_flags(found: SearchResult, source: Path) -> list[str]:
    """The flags of `whet exec` that build this engine's configuration."""
    c = _candidate(source)
    config = build_config(found.net, found.recipe, c, found.recipe.survivor.level)
    flags = [f"--backend={config.backend}"] if config.backend != BuildConfig().backend else []
    if config.threads:
        flags.append(f"--numThreads={config.threads}")
    flags += [f"--{p}" for p in config.precisions]
    if c.two_four:
        flags.append("--sparsity=enable")
    if config.passes:
        flags.append(f"--passes={','.join(config.passes)}")
    if config.optimization_level != 3:
        flags.append(f"--builderOptimizationLevel={config.optimization_level}")
    for _, shapes, _ in config.profiles:
        flags.append("--shapes=" + ",".join(f"{n}:{'x'.join(map(str, s))}" for n, s in shapes.items()))
    return flags


def _readme(found: SearchResult, made: dict[str, Any], source: Path, folder: Path) -> str:
    rows = made["rows"]
    original, chosen = rows[0], rows[made["chosen"]]
    about = {
        ENGINE: "the engine, for this machine (`whet retune` tunes it for another)",
        ONNX: "the model that it was built from, in floating point",
        QUANTIZED: "the same with the Q/DQ nodes that the engine computes",
        PRUNING: "which channels of which groups were kept: `whet prune MODEL --applyRecipe=pruning.json` applies it to the original",
        CALIBRATION: "the ranges that INT8 was calibrated with",
        LOCK: "the tactic lock: builds under it give the same engine, or say what moved",
        RECIPE: "the recipe of the search, and the point that was chosen",
        PAGE: "everything that was tried, in one page",
        DATA: "the same as data",
    }
    listed = [f"- `{name}`: {what}" for name, what in about.items() if (folder / name).is_file()]
    lines = [
        f"# {Path(found.recipe.model).stem}, by whet auto", "",
        "The target is met." if found.met else "The target is NOT met; this is the nearest engine that was found.", "",
        *(f"- {'met' if c['met'] else 'MISSED'}: {c['text']}" for c in chosen["checks"]),
        f"- {chosen['what']}",
        f"- {original['latency']['median_ms']:.3g} -> {chosen['latency']['median_ms']:.3g} ms a run (median, in turns), "
        f"{made['metric']} {original['metric']['value']:.4g} -> {chosen['metric']['value']:.4g}", "",
        "```sh", *made["commands"], "```", "", _lock_words(found, source), "", *listed, "",
    ]  # fmt: skip
    return "\n".join(lines)


def _lock_words(found: SearchResult, source: Path) -> str:
    """Whether building again from the files here gives the engine here: tried, not promised."""
    try:
        same = rebuilt_digest(found, source) == plan_digest(read_engine(source / ENGINE))
    except WhetError as e:
        return f"The lock does not build this engine again from the files here: {' '.join(str(e).split())[:300]}"
    if same:
        return "The lock was tried: it builds this very engine again from the files here."
    return "The lock builds another engine from the files here."


def rebuilt_digest(found: SearchResult, source: Path) -> str:
    """The digest of the engine that the model and the lock in `source` give. Raises LockError, FrontendError."""
    import dataclasses

    from whet.frontends import network_from_onnx

    model = locked_model(source)
    config = build_config(found.net, found.recipe, _candidate(source), found.recipe.survivor.level)
    return plan_digest(again(network_from_onnx(source / model), dataclasses.replace(config, lock=str(source / LOCK))))


def deploy_data(folder: Path) -> dict[str, Any]:
    """report.json of a deploy folder."""
    return json.loads((folder / DATA).read_text())
