"""The search: `whet auto examples/auto/digits.yaml` (on a GPU digits_gpu.yaml), killed three times at random times, then resumed to its end.

Writes benchmarks/results/<device>/auto_digits.json: minutes of all calls together, times of the kills, the compared engines, and whether
the final engine meets the target (at most half the original's time, at most one point of accuracy lost). WHET_MAX_CPU_ISA=avx2 shows what a CPU
without AVX-512 would reach.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from _record import command, provenance

from whet.backends.cpu.info import format_features, list_cpu_features

HERE = Path(__file__).resolve().parent
RECIPES = {"cpu": HERE.parent / "examples" / "auto" / "digits.yaml", "cuda": HERE.parent / "examples" / "auto" / "digits_gpu.yaml"}
SHOWN = ("name", "what", "kind", "met", "metric", "drop", "latency", "throughput", "memory_bytes", "engine_bytes", "energy", "build_seconds",
         "params", "flops")  # fmt: skip


def installed(names: tuple[str, ...]) -> list[str]:
    """The installed ones of the packages."""
    found = []
    for name in names:
        try:
            version(name)
        except PackageNotFoundError:
            continue
        found.append(name)
    return found


def flat(r: dict[str, Any]) -> dict[str, Any]:
    """The figures of an engine shown in tables, units in the names."""
    return {
        "score %": round(r["metric"]["value"], 2), "drop": round(r["drop"]["value"], 2), "drop low": round(r["drop"]["low"], 2),
        "drop high": round(r["drop"]["high"], 2), "ms": round(r["latency"]["median_ms"], 4), "p99 ms": round(r["latency"]["p99_ms"], 4),
        "of the original": round(r["latency"]["ratio"], 3), "images/s": round(r["throughput"]), "MiB": round(r["memory_bytes"] / 2**20, 2),
        "engine MiB": round(r["engine_bytes"] / 2**20, 2), "mJ": "not measurable" if r["energy"]["mj"] is None else round(r["energy"]["mj"], 3),
        "built in s": round(r["build_seconds"], 1),
    }  # fmt: skip


def main() -> int:
    """Runs it; exit code 0 if the target is met within the requested minutes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=list(RECIPES), default="cpu")
    parser.add_argument("--recipe", help="another recipe of the same kind")
    parser.add_argument("--out", help="result file (default: benchmarks/results/<device>/auto_digits.json)")
    parser.add_argument("--work", help="work folder (default: a temporary one)")
    parser.add_argument("--kills", type=int, default=3)
    parser.add_argument("--between", type=float, nargs=2, default=(20.0, 120.0), help="seconds until a kill")
    parser.add_argument("--trials", type=int, help="as for whet auto")
    parser.add_argument("--earlier", type=float, nargs="*", default=[], help="seconds of earlier calls on --work")
    parser.add_argument("--killed", type=int, default=0, help="how many of the earlier calls SIGKILL ended")
    parser.add_argument("--minutes", type=float, default=20.0, help="the bar")
    args = parser.parse_args()
    out = Path(args.out or HERE / "results" / {"cpu": "cpu", "cuda": "h200"}[args.device] / "auto_digits.json")
    recipe = args.recipe or str(RECIPES[args.device])
    seed = int(time.time())
    moments, kills, load = random.Random(seed), [], [os.getloadavg()[0]]
    with tempfile.TemporaryDirectory() as folder:
        work = args.work or str(Path(folder) / "digits.auto")
        call = [sys.executable, "-m", "whet.cli", "auto", recipe, "--out", work, *(["--trials", str(args.trials)] if args.trials else [])]
        began = time.monotonic()
        for _ in range(args.kills):
            wait = moments.uniform(*args.between)
            p = subprocess.Popen(call)
            try:
                p.wait(wait)
            except subprocess.TimeoutExpired:
                os.kill(p.pid, signal.SIGKILL)
                p.wait()
                kills.append(round(time.monotonic() - began, 1))
            load.append(os.getloadavg()[0])
        last = subprocess.run(call, check=False)
        minutes = (time.monotonic() - began + sum(args.earlier)) / 60
        load.append(os.getloadavg()[0])
        data = json.loads((Path(work) / "deploy" / "report.json").read_text())
        events = [json.loads(line) for line in (Path(work) / "events.jsonl").read_text().splitlines()]
    ended = [e["job"] for e in events if e["event"] == "end"]
    result = {
        **provenance(installed(("numpy", "onednn-cpu-gomp", "optuna", "llvmlite"))),
        "command": command("benchmarks/auto_digits.py"),
        "device": data["device"], "instruction_sets": format_features(list_cpu_features()),
        "exit_code": last.returncode, "met": data["met"], "minutes": minutes, "minutes_of_jobs": data["seconds"] / 60,
        "earlier_calls_seconds": args.earlier, "earlier_calls_killed": args.killed, "killed_at_seconds": kills, "seed_of_kills": seed,
        "jobs_begun": sum(e["event"] == "begin" and e["job"] is not None for e in events),
        "jobs_ended": len(ended), "jobs_ended_twice": len(ended) - len(set(ended)), "load_average": load,
        "trials": len([t for t in data["trials"] if t["same_as"] is None]), "trials_failed": sum(t["state"] == "failed" for t in data["trials"]),
        "scored_on": data["scored_on"], "others_load": data["load"], "chosen": data["rows"][data["chosen"]]["name"],
        "rows": [{k: r[k] for k in SHOWN} | flat(r) for r in data["rows"]],
    }  # fmt: skip
    out.write_text(json.dumps(result, indent=1) + "\n")
    chosen = data["rows"][data["chosen"]]
    verdict = "met" if data["met"] else "missed"
    print(f"{minutes:.1f} min with {len(kills) + args.killed} kills; target {verdict}: {chosen['latency']['ratio']:.3f}x, "
          f"drop {chosen['drop']['value']:.2f} points, {chosen['what']}")  # fmt: skip
    return 0 if data["met"] and minutes <= args.minutes else 1


if __name__ == "__main__":
    sys.exit(main())
