"""The deploy folder: engine, ONNX model, pruning recipe, lock, report and README. It is written atomically."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

from whet.builder import BuildConfig
from whet.builder.lock.lock import plan_digest
from whet.engine import read_engine
from whet.errors import BuildError, EngineError, WhetError
from whet.pruning import load_recipe
from whet.report import render_search_page
from whet.search.jobs import job as j
from whet.search.outcome.rebuild import RECIPE, make_deploy_recipe
from whet.search.outcome.result import SearchResult
from whet.search.outcome.summary import summarize_search
from whet.search.recipe.space import Candidate
from whet.search.stages.build_engine import build_config, rebuild_plan
from whet.search.stages.candidate_engines import CALIBRATION, ENGINE, LOCK, ONNX, PRUNING, QUANTIZED
from whet.search.stages.executor import find_plan_file
from whet.search.stages.finetune import FINETUNED

PAGE, DATA, README = "report.html", "report.json", "README.md"
PLAN = find_plan_file(Path(ENGINE)).name


def write_deploy(result: SearchResult) -> dict[str, Any]:
    """Writes the folder to a temporary path and swaps it in; returns the summary in report.json. Raises BuildError for a damaged engine."""
    folder = result.folder
    name = result.final["rows"][result.chosen]["folder"]
    source = folder.path / ("baselines" if "-b" in name else "survivors") / name
    new, old = folder.path / "deploy.new", folder.path / "deploy.old"
    for leftover in (new, old):
        shutil.rmtree(leftover, ignore_errors=True)
    new.mkdir()
    for file in (ENGINE, PLAN, ONNX, QUANTIZED, PRUNING, CALIBRATION, LOCK):
        if (source / file).is_file():
            shutil.copyfile(source / file, new / file)
    try:
        read_engine(new / ENGINE)
    except EngineError as e:
        raise BuildError(
            f"{source / ENGINE} was damaged after it was built: {e}. Delete the folder {source} and run the same command: it repeats that job."
        ) from e
    report = summarize_search(result)
    report["commands"] = list_commands(result, source)
    j.write_json(new / RECIPE, make_deploy_recipe(result.recipe, _read_candidate(source), source))
    j.write_json(new / DATA, report)
    (new / PAGE).write_text(render_search_page(report), encoding="utf-8", errors="backslashreplace")
    (new / README).write_text(_format_readme(result, report, source, new), encoding="utf-8", errors="backslashreplace")
    if folder.deploy.exists():
        os.replace(folder.deploy, old)
    os.replace(new, folder.deploy)
    shutil.rmtree(old, ignore_errors=True)
    return report


def _read_candidate(source: Path) -> Candidate:
    return Candidate.from_plain((j.read_result(source) or {})["candidate"])


def list_commands(result: SearchResult, source: Path) -> list[str]:
    """Commands to run and inspect the engine, and to rebuild it under its lock from the deployed model and from the original."""
    flags = build_flags(result, source)
    model = find_locked_model(source)
    return [
        f"whet exec --loadEngine={ENGINE}",
        f"whet explain {ENGINE}",
        " ".join([f"whet exec --onnx={model}", *flags, f"--lock={LOCK}", f"--saveEngine=again.engine  # the same engine, from {model}"]),
        f"whet rebuild .  # the same engine from the original model and its data: {_describe_steps(source)}, then built under {LOCK}",
    ]


def _describe_steps(source: Path) -> str:
    """Description of the steps that `whet rebuild` repeats."""
    stored = j.read_result(source) or {}
    recipe = load_recipe(source / PRUNING) if (source / PRUNING).is_file() else None
    steps = ["cut and recovered"] if recipe is not None and (recipe.groups or recipe.removed) else []
    steps += ["2:4 written"] if stored["candidate"]["two_four"] else []
    steps += ["fine-tuned"] if any(s["step"] == FINETUNED for s in stored["steps"]) else []
    steps += ["trained for INT8"] if find_locked_model(source) == QUANTIZED else []
    return ", ".join(steps) or "nothing was cut"


def find_locked_model(source: Path) -> str:
    """The model file the lock belongs to: the one with trained ranges, else the floating-point one (calibrated ranges are in the lock)."""
    qat = (j.read_result(source) or {}).get("qat")
    return QUANTIZED if qat and qat["kept"] == "trained" else ONNX


def build_flags(result: SearchResult, source: Path) -> list[str]:
    """The flags of `whet exec` for this engine's configuration."""
    c = _read_candidate(source)
    config = build_config(result.net, result.recipe, c, result.recipe.survivor.level)
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


def _format_readme(result: SearchResult, report: dict[str, Any], source: Path, folder: Path) -> str:
    rows = report["rows"]
    original, chosen = rows[0], rows[report["chosen"]]
    descriptions = {
        ENGINE: "whet's engine, for this machine (`whet retune` tunes it for another)",
        PLAN: "TensorRT's plan of the same network, which was timed and scored, for this GPU and this version of TensorRT",
        ONNX: "the floating-point model it was built from",
        QUANTIZED: "the same model with the engine's Q/DQ nodes",
        PRUNING: "the channels kept in each group (`whet prune MODEL --applyRecipe=pruning.json` cuts the original), and the layers with 2:4 weights",
        CALIBRATION: "the INT8 calibration ranges",
        LOCK: "the tactic lock: a build under it gives the same engine or reports what changed",
        RECIPE: "the recipe of the search and the chosen point",
        PAGE: "report page with all trials",
        DATA: "the same as data",
    }
    listed = [f"- `{name}`: {what}" for name, what in descriptions.items() if (folder / name).is_file()]
    lines = [
        f"# {Path(result.recipe.model).stem}, by whet auto", "",
        "The target is met." if result.met else "The target is NOT met; this is the nearest engine.", "",
        *(f"- {'met' if c['met'] else 'MISSED'}: {c['text']}" for c in chosen["checks"]),
        f"- {chosen['what']}",
        f"- {original['latency']['median_ms']:.3g} -> {chosen['latency']['median_ms']:.3g} ms per run (median, interleaved), "
        f"{report['metric']} {original['metric']['value']:.4g} -> {chosen['metric']['value']:.4g}", "",
        "```sh", *report["commands"], "```", "", _lock_words(result, source), "", *listed, "",
    ]  # fmt: skip
    return "\n".join(lines)


def _lock_words(result: SearchResult, source: Path) -> str:
    """States whether a build from this folder's files reproduces this folder's engine; the build is run."""
    try:
        same = rebuild_and_digest(result, source) == plan_digest(read_engine(source / ENGINE))
    except WhetError as e:
        return f"The lock does not reproduce this engine from the files in this folder: {' '.join(str(e).split())[:300]}"
    if same:
        return "Verified: the lock reproduces this engine from the files in this folder."
    return "The lock builds a different engine from the files in this folder."


def rebuild_and_digest(result: SearchResult, source: Path) -> str:
    """Builds the model in `source` under its lock and returns the engine's digest. Raises LockError, FrontendError."""
    import dataclasses

    from whet.frontends import network_from_onnx

    model = find_locked_model(source)
    config = build_config(result.net, result.recipe, _read_candidate(source), result.recipe.survivor.level)
    return plan_digest(rebuild_plan(network_from_onnx(source / model), dataclasses.replace(config, lock=str(source / LOCK))))


def deploy_data(folder: Path) -> dict[str, Any]:
    """Reads report.json of a deploy folder."""
    return json.loads((folder / DATA).read_text(encoding="utf-8"))
