"""A search's result as plain data: the contents of report.json, rendered by the report page and the terminal."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from whet import __version__
from whet.backends import get_backend
from whet.search.jobs import job as j
from whet.search.outcome.result import SearchResult
from whet.search.outcome.verdicts import Trial
from whet.search.recipe.recipe import AutoRecipe
from whet.search.recipe.space import Candidate
from whet.search.recipe.targets import Check, Measured, find_measured_pareto_set

AXES = {"memory_bytes": "memory", "engine_bytes": "size of the engine file", "mj": "energy per sample", "net_mj": "net energy per sample"}
_EIGHT_BITS = ("i8", "u8", "f8")  # prefixes of stored types' names
_VERSIONS = ("numpy", "onnx", "onednn-cpu-gomp", "optuna", "ray", "torch", "llvmlite")


def summarize_search(search: SearchResult) -> dict[str, Any]:
    """Plain data of a finished search; report/search_page.py renders them."""
    r = search.recipe
    best = set(find_measured_pareto_set([_measure_row(search, row) for row in search.final["rows"]]))
    rows = [_make_row(search, i) | {"front": i in best} for i in range(len(search.final["rows"]))]
    trials = _list_trials(search, rows)
    machine = get_backend(r.backend, threads=r.threads).describe()
    chosen = _get_result(search, rows[search.chosen]["folder"])
    return {
        "whet": __version__,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "model": Path(r.model).name,
        "device": ", ".join([str(machine.get("model", machine.get("name", r.device))), *r.executor_identity.values()]),
        "metric": "top-1 %" if r.metric == "top1" else r.metric.rpartition(":")[2],
        "higher_is_better": r.higher_is_better,
        "met": search.met,
        "chosen": search.chosen,
        "rows": rows,
        "scored_on": search.final["scored_on"],
        "load": search.final["load"],
        "trials": trials,
        "limits": _find_limits(search),
        "axes": _list_axes(search),
        "cost_name": f"time per {'sample' if search.judging.cost_a_sample else 'run'}, relative to the FP32 original",
        "steps": _list_steps(chosen),
        "layers": pair_layers(_get_result(search, rows[0]["folder"])["layers"], chosen["layers"]) if search.chosen else [],
        "classes": {name: search.space.describe_class(name) for name in search.space.classes},
        "left_out": [list(x) for x in search.space.left_out],
        "warnings": _list_warnings(search, trials),
        "notes": [*search.notes, *_note_executor(r), *chosen["notes"]],
        "seconds": search.seconds,
        "recipe": r.to_plain(),
        "recipe_text": json.dumps(r.to_plain(), indent=1),
        "machine_text": json.dumps({"machine": machine, "python": sys.version.split()[0], "versions": _list_versions()}, indent=1, default=str),
        "commands": [],
    }


def _get_result(search: SearchResult, name: str) -> dict[str, Any]:
    """The result of a compared engine."""
    return j.read_result(search.folder.path / ("baselines" if "-b" in name else "survivors") / name) or {}


def _measure_row(search: SearchResult, row: Mapping[str, Any]) -> Measured:
    """The point and the intervals of a compared engine."""
    return search.judging.measured(row, Candidate.from_plain(_get_result(search, row["folder"])["candidate"]).batch)


def _make_row(search: SearchResult, i: int) -> dict[str, Any]:
    r = search.final["rows"][i]
    own, checked = _get_result(search, r["folder"]), search.checks[i]
    original = "-b" in r["folder"]
    c = Candidate.from_plain(own["candidate"])
    return {
        **r, "kind": "original" if original else "survivor", "cost": search.points[i][0] / _get_original_cost(search),
        "met": all(x.met for x in checked), "checks": list_checks(checked),
        "name": f"original, {c.precision}" + (f", batch {c.batch}" if c.batch != 1 else "") if original else f"trial {int(r['folder'])}",
        "what": ("as it is" if original else c.words()) + remark_on_unused_int8(own) + _describe_int8(own.get("qat")), "qat": own.get("qat"),
        "build_seconds": own["build_seconds"], "params": own["params"], "flops": own["flops"], "precision": own["precision"],
    }  # fmt: skip


def remark_on_unused_int8(result: Mapping[str, Any]) -> str:
    """A remark if 8 bits were permitted but the engine computes in floating point."""
    asked = result["candidate"]["precision"]
    if asked not in ("int8", "fp8") or any(kind.startswith(_EIGHT_BITS) for kind in result["precision"]):
        return ""
    return f" (computes in floating point: {asked.upper()} was not faster)"


def _describe_int8(qat: Mapping[str, Any] | None) -> str:
    """Scores with INT8 training and with calibration alone."""
    if not qat or qat["trained"] is None:
        return ""
    values = {k: f"{qat[k]['value']:.4g}" for k in ("trained", "calibrated")}
    if qat["kept"] == "trained":
        return f", trained for INT8: {values['trained']} (calibrated: {values['calibrated']})"
    return f", calibrated: {values['calibrated']} (trained for INT8: {values['trained']}, not better)"


def list_checks(checked: Sequence[Check]) -> list[dict[str, Any]]:
    """Checks of the target as JSON data."""
    return [{"text": c.text, "met": c.met, "value": c.value, "limit": c.limit} for c in checked]


def _list_trials(search: SearchResult, rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    kept = {r["folder"]: r for r in rows if r["kind"] == "survivor"}
    done = [t for t in search.trials if t.result is not None and t.result["state"] == "done" and t.same_as is None]
    points = {t.number: search.judging.measured(t.result or {}, t.candidate.batch) for t in done}
    order = list(points)
    front = {order[i] for i in find_measured_pareto_set([points[n] for n in order])}
    table = []
    for t in search.trials:
        r = t.result or {"state": "failed", "reason": "its result is gone", "seconds": 0.0}
        row: dict[str, Any] = {"number": t.number, "what": t.candidate.words(), "candidate": t.candidate.to_plain(), "state": r["state"],
                               "same_as": t.same_as, "seconds": r.get("seconds"), "kept": False, "met": False, "front": False}  # fmt: skip
        if r["state"] == "done":
            checked = search.judging.trial_checks(t)
            row |= {k: r[k] for k in ("metric", "drop", "latency", "throughput", "memory_bytes", "engine_bytes", "energy", "build_seconds", "load")}
            row |= {"met": all(c.met for c in checked), "checks": list_checks(checked), "what": row["what"] + remark_on_unused_int8(r)}
            if t.same_as is None:
                row |= {"cost": points[t.number].point[0] / _get_original_cost(search), "front": t.number in front}
        row["kept"] = t.same_as is None and f"{t.number:04d}" in kept
        full = j.read_result(search.folder.survivor(t.number)) if t.same_as is None else None
        if full is not None and full["state"] == "failed":
            row["verdict"] = f"survivor, but failed with full effort: {full['reason']}"
        else:
            row["verdict"] = _explain_outcome(t, row, kept.get(f"{t.number:04d}"), points, rows[search.chosen])
        table.append(row)
    return table


def _explain_outcome(
    t: Trial, row: Mapping[str, Any], survived: Mapping[str, Any] | None, points: Mapping[int, Measured], chosen: Any
) -> str:
    """The outcome of a trial with its reason."""
    if t.same_as is not None:
        return f"same engine as trial {t.same_as}: not built again"
    if row["state"] != "done":
        return f"{row['state']}: {(t.result or {}).get('reason', 'no result')}"
    misses = "; ".join(c["text"] for c in row["checks"] if not c["met"])
    if survived is not None:
        if survived is chosen:
            return "chosen"
        after = "; ".join(c["text"] for c in survived["checks"] if not c["met"])
        return f"survivor; with full recovery it misses {after}" if after else "survivor; meets the target, another was preferred"
    if misses:
        return f"rejected: {misses}"
    better = next((n for n, p in points.items() if p.clearly_dominates(points[t.number])), None)
    if better is not None:
        return f"meets the target; trial {better} is better in both"
    return "meets the target; others rank higher by `prefer`"


def _list_steps(chosen: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The steps of the chosen engine, the engine last."""
    types = ", ".join(f"{n} {p}" for p, n in sorted(chosen["precision"].items(), key=lambda x: -x[1]))
    last = {"step": f"engine (layers: {types})", "params": chosen["params"], "flops": chosen["flops"], "metric": chosen["metric"],
            "ms": chosen["latency"]["median_ms"], "seconds": chosen["build_seconds"]}  # fmt: skip
    return [*chosen["steps"], last]


def pair_layers(before: Sequence[Mapping[str, Any]], after: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Layers of two engines paired by the model nodes they compute; unmatched layers form rows with one side empty."""

    def get_nodes(x: Mapping[str, Any]) -> frozenset[str]:
        return frozenset(x["sources"]) or frozenset((x["name"],))

    left = list(after)
    pairs = []
    for b in before:
        if b["type"] == "Reformat" and not b["sources"]:
            continue
        partners = [a for a in left if get_nodes(a) & get_nodes(b)]
        for a in partners:
            left.remove(a)
        pairs.append({"name": b["name"], "before": f"{b['tactic']} {b['formats']}", "before_ms": b["ms"],
                      "after": ", ".join(dict.fromkeys(f"{a['tactic']} {a['formats']}" for a in partners)),
                      "after_ms": sum(a["ms"] or 0.0 for a in partners) if partners else None})  # fmt: skip
    rest = sum(a["ms"] or 0.0 for a in left)
    if left:
        pairs.append({"name": f"{len(left)} others: reformats, quantize layers", "before": "", "before_ms": None, "after": "", "after_ms": rest})
    return pairs


def _get_original_cost(search: SearchResult) -> float:
    """Cost of the FP32 original at the first batch: the unit of the plot, independent of external load."""
    return search.judging.point(search.judging.original(search.judging.batches[0]), search.judging.batches[0])[0]


def _note_executor(r: AutoRecipe) -> list[str]:
    """A note on the figures that are TensorRT's and those that are whet's, if TensorRT is the executor."""
    version = r.executor_identity.get("executor")
    if version is None:
        return []
    return [f"Times, memory, energy, file sizes and scores are those of {version}'s engines; the layers, their times and latency budgets are whet's."]


def _find_limits(search: SearchResult) -> dict[str, float | None]:
    """The target's limits on the plot's axes; None where it has none."""
    t, original = search.recipe.target, search.final["rows"][0]
    cost = None
    if t.latency is not None and not search.judging.cost_a_sample:
        cost = t.latency.value / (1.0 if t.latency.relative else original["latency"]["median_ms"])
    elif t.throughput is not None and search.judging.cost_a_sample:
        cost = (1.0 if t.throughput.relative else original["throughput"]) / t.throughput.value
    sign = 1 if search.recipe.higher_is_better else -1
    metric = None if t.accuracy_drop is None else original["metric"]["value"] - sign * t.accuracy_drop
    return {"cost": cost, "metric": metric}


def _list_axes(search: SearchResult) -> list[dict[str, Any]]:
    """The quantities with a target, each an axis of a plot: its name, the key of a row (None: the cost) and the limit relative to the original.

    Without a target in time another quantity comes first; without any the only axis is time.
    """
    t, original = search.recipe.target, search.final["rows"][0]
    timed = t.latency is not None or t.throughput is not None
    name = f"time per {'sample' if search.judging.cost_a_sample else 'run'}"
    axes: list[dict[str, Any]] = [{"name": name, "key": None, "limit": _find_limits(search)["cost"]}] if timed else []
    for key, amount in (("memory_bytes", t.memory), ("engine_bytes", t.engine_size), ("mj", t.energy), ("net_mj", t.net_energy)):
        base = original["energy"].get(key) if key in ("mj", "net_mj") else original[key]
        if amount is not None and base:
            axes.append({"name": AXES[key], "key": key, "limit": amount.value if amount.relative else amount.value / base})
    return axes or [{"name": name, "key": None, "limit": None}]


def _list_warnings(search: SearchResult, trials: Sequence[Mapping[str, Any]]) -> list[str]:
    """Warnings on the validity of the measurements."""
    warnings = []
    done = [t for t in trials if t["state"] == "done" and t["same_as"] is None]
    busy = sum(t["load"]["disturbed"] for t in done)
    if busy:
        warnings.append(f"Other processes loaded the machine in {busy} of {len(done)} trials and lengthened their times; ratios are interleaved.")
    if (beside := describe_external_load([search.final["load"], *(t["load"] for t in done)])) is not None:
        warnings.append(beside)
    row, allowed = search.final["rows"][search.chosen], search.recipe.target.accuracy_drop
    drop = row["drop"]
    if drop.get("high") is not None and allowed is not None and drop["high"] > allowed:
        margin = f"{row['metric']['samples']} samples allow a drop up to {drop['high']:.2g} (95 % interval)"
        warnings.append(f"The drop is {drop['value']:.2g}, but {margin}: more samples would narrow the interval.")
    if search.final["scored_on"] == "score":
        own = search.recipe.metric != "top1"
        why = "The metric function takes no `which`, so the final comparison used the same data" if own else "No data.judge was given"
        warnings.append(f"{why}: the chosen engine is scored on the data used to choose it, which is optimistic.")
    return warnings


def describe_external_load(loads: Sequence[Mapping[str, Any]]) -> str | None:
    """Describes other processes on the GPU during timing; None if there were none (or no GPU)."""
    beside = [load["gpu_processes"] for load in loads if load.get("gpu_processes")]
    if not beside:
        return None
    pids = sorted({p for some in beside for p in some})
    named = ", ".join(map(str, pids[:6])) + (", ..." if len(pids) > 6 else "")
    return (
        f"Other processes used the GPU in {len(beside)} of {len(loads)} timings (process {named}): if they were computing, those times are too "
        "long. Ratios come from interleaved runs; for reliable times stop those processes or use another device."
    )


def _list_versions() -> dict[str, str]:
    known = {}
    for name in _VERSIONS:
        try:
            known[name] = version(name)
        except PackageNotFoundError:
            continue
    return known
