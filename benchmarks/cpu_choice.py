"""What the builder's whole-graph choice is worth on the CPU: views instead of copies, fused or apart, beam or look ahead, threads.

`python benchmarks/cpu_choice.py [--models squeezenet1_1,densenet121,yolov5s] [--threads] [--out FILE]`

Each network of the zoo is built twice at batch 1 with one timing cache: as it is, and with Concat, Split and Slice always copied; both
engines are then timed in turns in one process. The rows also hold what the build reports: the totals that each way of solving the core of
the choice came to, how many fused layers were timed against their parts and how many parts won, and how long the build took. With
`--threads`, engines for all threads, half and one are timed in turns too.
"""

import argparse
import dataclasses
import json
import tempfile
import time
from pathlib import Path
from statistics import median

from _record import provenance

import whet.zoo
from whet.backends import get_backend
from whet.builder import BuildConfig, build, search
from whet.engine.probe import probe_inputs, probe_shapes
from whet.engine.schema import encode
from whet.frontends import network_from_onnx
from whet.runtime import bind

ROUNDS, SECONDS = (7, 60), 6.0


def built(path: Path, cache: Path, **options):
    """(plan, seconds of building); batch 1, not verified: only times are asked for."""
    net = network_from_onnx(path)
    shapes = {t.name: tuple(d if isinstance(d, int) else 1 for d in t.shape) for t in net.inputs}
    config = BuildConfig(profiles=((shapes, shapes, shapes),), verify=False, timing_cache=str(cache))
    start = time.perf_counter()
    return build(net, dataclasses.replace(config, **options)), time.perf_counter() - start


def in_turns(plans) -> tuple[list[float], list[float], float]:
    """Median ms of each engine, half the distance of its quartiles, and what share of a CPU others took."""
    machine = get_backend("cpu")
    bounds = [bind(p, machine) for p in plans]
    for p, b in zip(plans, bounds, strict=True):
        b.feed(probe_inputs(p.network, 0, probe_shapes(p)))
        b.seconds(3)
    once = sum(b.seconds(1)[0] for b in bounds)
    rounds = max(ROUNDS[0], min(ROUNDS[1], int(SECONDS / once)))
    samples = [[] for _ in plans]
    with machine.watch() as load:
        for r in range(rounds):
            for k in range(len(plans)) if r % 2 == 0 else reversed(range(len(plans))):
                samples[k].append(bounds[k].seconds(1)[0] * 1e3)
    quartiles = [sorted(s) for s in samples]
    spread = [(q[(3 * (len(q) - 1)) // 4] - q[(len(q) - 1) // 4]) / 2 for q in quartiles]
    return [median(s) for s in samples], spread, load.others


def row(name: str, folder: Path) -> dict:
    path, cache = folder / f"{name}.onnx", folder / f"{name}.sqlite"
    whet.zoo.save(name, path)
    plan, seconds = built(path, cache)
    refusal = search.view_refusal
    search.view_refusal = lambda *a, **k: "copied, for comparison"
    try:
        copies, _ = built(path, cache)
    finally:
        search.view_refusal = refusal
    (ms, copied_ms), spread, others = in_turns([plan, copies])
    rows = [c for group in plan.report.candidates.values() for c in group if c.tactic == "apart"]
    return {
        "model": name,
        "ms": ms,
        "copied_ms": copied_ms,
        "spread_ms": spread,
        "others_cpus": others,
        "views": sum(c.tactic == "cpu/part_view" for c in plan.choices.values()),
        "joins": sum(layer.op in ("Concat", "Split", "Slice") for layer in plan.network.layers),
        "arena_bytes": plan.arenas[0].total,
        "copied_arena_bytes": copies.arenas[0].total,
        "method": plan.report.choice.method,
        "core_layers": len(plan.report.choice_core),
        "tried": {f"{method} ms": ms for method, ms in plan.report.choice.tried_ms.items()},
        "fused_timed_against_parts": sum(c.ms is not None for c in rows),
        "apart": len(plan.report.unfused),
        "kept": plan.report.choice.kept,
        "build_seconds": seconds,
    }


def threads_row(name: str, folder: Path) -> dict:
    path = folder / f"{name}.onnx"
    whet.zoo.save(name, path)
    plan, seconds = built(path, folder / f"{name}.sqlite", threads=-1)
    return {"model": name, "threads": encode(plan.report.threads), "kept": plan.threads, "build_seconds": seconds}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="squeezenet1_1,densenet121,yolov5s")
    parser.add_argument("--threads", action="store_true", help="measure thread counts instead")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        one = threads_row if args.threads else row
        rows = [one(name, Path(folder)) for name in args.models.split(",")]
    for r in rows:
        print(json.dumps(r))
    if args.out:
        before = json.loads(args.out.read_text())["rows"] if args.out.exists() else []
        kept = [r for r in before if (r["model"], "threads" in r) not in {(n["model"], "threads" in n) for n in rows}]
        args.out.write_text(json.dumps({**provenance(("numpy", "onednn-cpu-gomp", "onnx")), "rows": [*kept, *rows]}, indent=1) + "\n")


if __name__ == "__main__":
    main()
