"""Gains of the builder's whole-graph selection on the CPU: views instead of copies, fused or unfused, beam or look-ahead, threads.

`python benchmarks/cpu_choice.py [--models squeezenet1_1,densenet121,yolov5s] [--threads] [--out FILE]`

Each network of the zoo is built twice at batch 1 with one timing cache: by default, and with Concat, Split and Slice always copied; both
engines are then compared in one process. The rows also have the build's report: the totals reached by each solver of the core problem,
the number of fused layers timed against their parts and of parts that won, and the build time. With `--threads`, engines for all threads,
half and one are compared too.
"""

import argparse
import dataclasses
import json
import tempfile
import time
from functools import partial
from pathlib import Path

from _record import provenance

import whet.zoo
from whet.backends import get_backend
from whet.builder import BuildConfig, build
from whet.builder.select import search
from whet.engine.probe import probe_inputs, probe_shapes
from whet.engine.schema import encode
from whet.frontends import network_from_onnx
from whet.measure.compare import Ranking, compare
from whet.measure.policy import BENCHMARKS
from whet.runtime import bind


def build_timed(path: Path, cache: Path, **options):
    """(plan, seconds of building); batch 1, unverified: only times are needed."""
    net = network_from_onnx(path)
    shapes = {t.name: tuple(d if isinstance(d, int) else 1 for d in t.shape) for t in net.inputs}
    config = BuildConfig(profiles=((shapes, shapes, shapes),), verify=False, timing_cache=str(cache))
    start = time.perf_counter()
    return build(net, dataclasses.replace(config, **options)), time.perf_counter() - start


def time_engines(plans) -> Ranking:
    """Compares the engines on the same inputs."""
    backend = get_backend("cpu")
    bounds = [bind(p, backend) for p in plans]
    for p, b in zip(plans, bounds, strict=True):
        b.feed(probe_inputs(p.network, 0, probe_shapes(p)))
    return compare([partial(run_once, b) for b in bounds], BENCHMARKS, watch=backend.watch)


def run_once(bound) -> float:
    return bound.seconds(1)[0]


def row(name: str, folder: Path) -> dict:
    path, cache = folder / f"{name}.onnx", folder / f"{name}.sqlite"
    whet.zoo.save(name, path)
    plan, seconds = build_timed(path, cache)
    refusal = search.view_refusal
    search.view_refusal = lambda *a, **k: "copied, for comparison"
    try:
        copies, _ = build_timed(path, cache)
    finally:
        search.view_refusal = refusal
    ranking = time_engines([plan, copies])
    ms, copied_ms = (1e3 * ranking.seconds(k) for k in range(2))
    rows = [c for group in plan.report.candidates.values() for c in group if c.tactic == "unfused"]
    return {
        "model": name,
        "ms": ms,
        "copied_ms": copied_ms,
        "spread_ms": [1e3 * ranking.spread(k) for k in range(2)],
        "others_cpus": ranking.load.others,
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
    plan, seconds = build_timed(path, folder / f"{name}.sqlite", threads=-1)
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
