"""Two trees of whet on one GPU: INT8 engines of both are built, then timed in processes that alternate between the trees.

    python benchmarks/gpu_paired.py run OLD_TREE CACHES NETWORK:BATCH... [--processes N] [--seconds S]
    python benchmarks/gpu_paired.py merge PART...

CACHES has the calibration caches old/NETWORK.json and new/NETWORK.json (`gpu_int8.py calibrate` in each tree). Builds run one at a time, case by
case, and are not verified; their timing caches are kept in $OUT/times and are taken from CACHES/times if they are there, so that builds that a
time limit ends go on in the next call. A row: the median milliseconds of each process, the ratio old/new of neighbouring processes with its
median and range. The results of `merge` are benchmarks/results/h200/paired.json.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
RESULT = HERE / "results" / "h200" / "paired.json"
REPLAYS, BLOCKS = 30, 9

# Runs with the modules of either tree: the import of build_int8 is the only name that differs.
BUILD = """
import sys
from whet import zoo
from whet.builder import BuildConfig
from whet.engine import write_engine
from whet.frontends.onnx import network_from_onnx
try:
    from whet.builder.precision.int8 import Calibration, build_int8
except ImportError:
    from whet.builder.quantized import Calibration, build_int8
name, batch, cache, times, engine = sys.argv[1:]
net = network_from_onnx(zoo.build(name))
shape = {t.name: tuple(d if isinstance(d, int) else int(batch) for d in t.shape) for t in net.inputs}
config = BuildConfig(backend="cuda", precisions=("fp16", "int8"), profiles=((shape, shape, shape),), timing_cache=times, verify=False)
write_engine(build_int8(net, config, Calibration(cache=cache)), engine)
"""
TIME = """
import json, statistics, sys
from whet.backends import get_backend
from whet.engine import read_engine
from whet.runtime import bind
engine, replays, blocks = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
plan = read_engine(engine)
bound = bind(plan, get_backend("cuda"))
bound.run()
times = [1e3 * t for _ in range(blocks) for t in bound.seconds(replays + 3)[3:]]
int8 = sum("i8" in str(t.type) for x in plan.network.layers for t in x.outputs)
print("TIME " + json.dumps([statistics.median(times), len(plan.network.layers), int8]))
"""


def in_tree(tree: Path, code: str, *words: object, seconds: float) -> str:
    """Runs code with the package of a tree; its standard output. Raises subprocess.SubprocessError."""
    environment = {**os.environ, "PYTHONPATH": str(tree / "src")}
    ended = subprocess.run(
        [sys.executable, "-c", code, *map(str, words)], env=environment, capture_output=True, text=True, timeout=max(1.0, seconds), check=False
    )
    if ended.returncode:
        raise subprocess.SubprocessError(ended.stderr[-600:])
    return ended.stdout


def measure_rows(old: Path, caches: Path, cases: list[str], processes: int, seconds: float, out: Path) -> None:
    """Builds both trees' engines of a case, then times them, case after case; writes out/paired.json after each."""
    end = time.monotonic() + seconds
    trees = {"old": old, "new": HERE.parent}
    (out / "times").mkdir(parents=True, exist_ok=True)
    work = Path("/tmp/whet-paired")
    work.mkdir(exist_ok=True)

    def build(case: str, side: str) -> str:
        name, batch = case.split(":")
        times = work / f"{side}-{name}-{batch}.sqlite"
        kept = caches / "times" / times.name
        if kept.exists():
            shutil.copyfile(kept, times)
        begun = time.monotonic()
        try:
            engine, cache = work / f"{side}-{name}-{batch}.engine", caches / side / f"{name}.json"
            in_tree(trees[side], BUILD, name, batch, cache, times, engine, seconds=end - 15 - begun)
            said = "built"
        except subprocess.SubprocessError as error:
            said = str(error)[-600:]
        if times.exists():
            shutil.copyfile(times, out / "times" / times.name)
        print(f"{case} {side}: {said}, {time.monotonic() - begun:.0f} s", flush=True)
        return said

    rows: list[dict[str, Any]] = []
    for case in cases:
        name, batch = case.split(":")
        if any(build(case, s) != "built" for s in trees):
            continue
        ms: dict[str, list[float]] = {s: [] for s in trees}
        layers: dict[str, list[int]] = {}
        for k in range(processes):
            for side in ("old", "new") if k % 2 == 0 else ("new", "old"):
                said_by = in_tree(trees[side], TIME, work / f"{side}-{name}-{batch}.engine", REPLAYS, BLOCKS, seconds=60)
                found = json.loads(next(x for x in said_by.splitlines() if x.startswith("TIME "))[5:])
                ms[side].append(round(found[0], 5))
                layers[side] = found[1:]
        ratios = [a / b for a, b in zip(ms["old"], ms["new"], strict=True)]
        rows.append({
            "case": f"{name} INT8 batch {batch}", "old_ms": ms["old"], "new_ms": ms["new"], "ratio": round(statistics.median(ratios), 4),
            "range": [round(min(ratios), 4), round(max(ratios), 4)], "layers_and_int8_outputs": layers,
        })  # fmt: skip
        print(rows[-1], flush=True)
        (out / "paired.json").write_text(json.dumps(rows, indent=1) + "\n")


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("what", choices=("run", "merge"))
    p.add_argument("words", nargs="+")
    p.add_argument("--processes", type=int, default=8, help="per tree and case")
    p.add_argument("--seconds", type=float, default=600)
    p.add_argument("--commits", nargs=2, default=("", ""), help="for merge: old and new commit")
    p.add_argument("--device", default="NVIDIA H200", help="for merge")
    p.add_argument("--date", default="", help="for merge: of the run")
    given = p.parse_args()
    if given.what == "run":
        measure_rows(Path(given.words[0]), Path(given.words[1]), given.words[2:], given.processes, given.seconds, Path(os.environ.get("OUT", ".")))
        return
    rows = [r for part in given.words for r in json.loads(Path(part).read_text())]
    old, new = given.commits
    record = {
        "date": given.date, "commit": new, "old_commit": old, "device": given.device,
        "command": f"python benchmarks/gpu_paired.py run OLD_TREE CACHES {' '.join(r['case'].replace(' INT8 batch ', ':') for r in rows)}",
        "rows": rows,
    }  # fmt: skip
    RESULT.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
