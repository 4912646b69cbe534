"""Tables of the example: all engines, the worked case step by step, one row per network, and competitors at equal accuracy."""

from __future__ import annotations

import argparse
import json
import platform
import sys
from pathlib import Path

from tune import file_of
from variants import VARIANTS

from measure import HERE, read
from whet.backends import get_backend

#: The worked case: the steps of a practitioner in order.
STEPS = {
    "published": "as published", "original": "fine-tuned, not cut", "depth": "14 of 27 blocks out, fine-tuned",
    "latency-55": "cut to 55 % of the CPU's time, fine-tuned", "latency-48": "cut to 48 % of the CPU's time, fine-tuned",
    "gpu-55": "13 blocks out, chosen by the GPU's times at batch 1, fine-tuned",
    "gpu128-50": "14 blocks out, chosen by the GPU's times at batch 128, fine-tuned", "2:4": "2:4, fine-tuned",
    "original-long": "fine-tuned longer, not cut", "stages-39": "39 % of the FLOPs: 16 of 27 blocks out, fine-tuned longer",
    "original-more": "trained on, not cut", "stages-39-more": "39 % of the FLOPs: 16 of 27 blocks out, trained on",
}  # fmt: skip


def print_table(out: Path, args: argparse.Namespace) -> None:
    """Prints the table; with args.save also writes four results: all rows, the worked case, its short form, competitors at equal accuracy."""
    rows = read(out, args)
    _speeds(rows)
    flat = flattened(rows, out)
    show(flat, args)
    if args.save:
        how = {n: json.loads(p.read_text()) for n in ("teacher", *VARIANTS) for p in (told_of(n, out),) if p.exists()}
        tuning = {n: {k: v for k, v in d.items() if k != "history"} for n, d in how.items()}
        save(flat, Path(args.save) / "resnet56.json", args, {"fine-tuning": tuning})
        if case := [{"step": STEPS[r["network"]], **r} for r in flat if r["network"] in STEPS]:
            save(case, Path(args.save) / "resnet56_case.json", args, {})
            save(short(flat), Path(args.save) / "resnet56_short.json", args, {})
        if compared := against(flat):
            save(compared, Path(args.save) / "resnet56_against.json", args, {})


def flattened(rows: list[dict], out: Path) -> list[dict]:
    """One record per engine and batch. `JPEG10k %` is the accuracy of the trained network, before any engine, on all 10,000 images."""
    made = []
    for r in rows:
        p = told_of(r["network"], out)
        whole = {"JPEG10k %": round(100 * json.loads(p.read_text())["jpeg_test"], 2)} if p.exists() else {}
        for batch, ms in r.get("ms", {}).items():
            about = {k: v for k, v in r.items() if k not in ("file", "ms", "run at", "peak MiB")}
            made.append(about | whole | {
                "batch": int(batch), "ms": ms["median"], "ms low": ms["quartiles"][0], "ms high": ms["quartiles"][1], "images/s": ms["images/s"],
                "speed": ms.get("speed"), "peak MiB": r.get("peak MiB"),
            })  # fmt: skip
    return made


def short(flat: list[dict]) -> list[dict]:
    """The worked case, one record per network: the engine for single images in each precision, and the difference in accuracy to the equally
    fine-tuned original (points with their 95 % interval)."""
    made: dict[str, dict] = {}
    for r in flat:
        if r["network"] not in STEPS or r["batches"] != "1":
            continue
        one = made.setdefault(r["network"], {"network": STEPS[r["network"]], "FLOPs fewer": r["FLOPs fewer"], "parameters": r["parameters"]})
        kind = r["precision"]
        one |= {f"{kind} ms": r["ms"], f"{kind} speed": r["speed"], f"{kind} MiB": r["peak MiB"]}
        for test in ("exact", "JPEG"):
            if f"{test} %" in r:
                one[f"{kind} {test} %"] = r[f"{test} %"]
            if r.get(f"{test} points low") != r.get(f"{test} points high"):  # the same network: no difference
                one[f"{kind} {test} points"] = "{:+.2f} [{:+.2f}, {:+.2f}]".format(*(r[f"{test} points{x}"] for x in ("", " low", " high")))
    return list(made.values())


ALIKE = 0.3  # points: one standard error of an accuracy on 10,000 images


def against(flat: list[dict]) -> list[dict]:
    """whet's cuts compared with each competitor at equal accuracy, at every batch and precision: cuts by FLOPs with cuts by latency of the same
    method, cuts by another library with any of whet's.

    Equal accuracy: the fastest of whet's cuts that is at most ALIKE points below the competitor on the 10,000 JPEG images after the same fine-tuning.
    """
    made = []
    for r in flat:
        if not r["network"].startswith(("tp-", "flops-")) or "JPEG10k %" not in r:
            continue
        mine = ("latency-", "gpu", "depth") if r["network"].startswith("tp-") else ("latency-", "gpu")
        same = [w for w in flat if w["network"].startswith(mine) and all(w[k] == r[k] for k in ("precision", "batches", "batch"))]
        if not same:
            continue  # no engine was timed in this precision at this batch
        fit = [w for w in same if w["JPEG10k %"] >= r["JPEG10k %"] - ALIKE]
        best = min(fit, key=lambda w: w["ms"], default=None)
        row = {"rival": r["network"], "precision": r["precision"], "batch": r["batch"]}
        row |= {"rival JPEG10k %": r["JPEG10k %"], "rival FLOPs fewer": r["FLOPs fewer"], "rival ms": r["ms"]}
        if best is None:
            row |= {"whet": "none is as accurate"}
        else:
            row |= {"whet": best["network"], "whet JPEG10k %": best["JPEG10k %"], "whet FLOPs fewer": best["FLOPs fewer"], "whet ms": best["ms"]}
            row["rival ms / whet ms"] = round(r["ms"] / best["ms"], 3)
        made.append(row)
    return made


def _speeds(rows: list[dict]) -> None:
    """Adds the speed relative to the first FP32 row of the same batch, and images per second."""
    base: dict[str, float] = {}
    for r in rows:
        if r["precision"] == "FP32":
            for b, t in r.get("ms", {}).items():
                base.setdefault(b, t["median"])
    for r in rows:
        for b, t in r.get("ms", {}).items():
            t["images/s"] = round(int(b) / t["median"] * 1e3)
            if b in base:
                t["speed"] = round(base[b] / t["median"], 3)


def show(flat: list[dict], args: argparse.Namespace) -> None:
    """Prints one line per engine and batch."""
    from rich.console import Console
    from rich.table import Table

    t = Table(title=f"ResNet-56 on this {'GPU' if args.backend == 'cuda' else 'CPU'}", title_justify="left")
    shown = ("network", "precision", "batches", "batch", "parameters", "MFLOPs", "FLOPs fewer", "exact %", "JPEG %", "ms", "speed", "peak MiB")
    for key in shown:
        t.add_column(key, justify="left" if key in ("network", "precision") else "right")
    for r in flat:
        t.add_row(*(str(r.get(k, "-")) for k in shown))
    Console(width=None if sys.stdout.isatty() else 150).print(t)


def save(rows: list[dict], path: Path, args: argparse.Namespace, more: dict) -> None:
    """Writes a result."""
    sys.path.insert(0, str(HERE.parents[1] / "benchmarks"))
    from _record import command, provenance

    machine = get_backend(args.backend, threads=args.threads).describe()
    result = {
        **provenance(("numpy",)),
        "command": command(f"examples/resnet56/{Path(sys.argv[0]).name}"),
        "device": machine.get("model") or machine.get("name") or platform.processor(),
        "threads": args.threads,
        "rows": rows,
        **more,
    }
    path.write_text(json.dumps(result, indent=1) + "\n")


def told_of(name: str, out: Path) -> Path:
    """The record of a fine-tuning of this run, or the one in the repository."""
    mine = out / f"{file_of(name)}.json"
    return mine if mine.exists() else HERE / "tuned" / f"{file_of(name)}.json"
