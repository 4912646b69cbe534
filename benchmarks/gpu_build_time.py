"""Build times on a GPU, by phase: with empty caches, with compiled kernels, with a complete timing cache.

    python benchmarks/gpu_build_time.py [--calibrations FOLDER] [--out FILE] [--states empty,kernels,timings] resnet50:1:fp16 resnet18:1:int8
    python benchmarks/gpu_build_time.py --merge FILE...      merges runs of several files into results/h200/build_time.json

A row: one verified build in a separate process, as by `whet exec --backend=cuda --fp16` (and `--int8 --calib=FOLDER/NETWORK.json`). `known` is
the state of the caches at its start: nothing; the compiled kernels; kernels and times (of the previous row). `build_s` is the builder's own
time, `process_s` that of the whole process: Python's imports, reading the network, creation of the GPU's context, and the build. The phases are
those of the engine's report. The weights are the zoo's (random, of the real sizes); calibration files come from `gpu_int8.py calibrate`.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "src"))

from _record import provenance

RESULT = Path(__file__).parent / "results" / "h200" / "build_time.json"
BARS = {"empty": 60.0, "timings": 5.0}  # seconds, of ResNet-50 FP16 at batch 1
KNOWN = {"empty": "nothing", "kernels": "kernels", "timings": "kernels and times"}
PHASES = {
    "timing": ("timing",), "apart": ("fused or unfused", "fused or apart"), "network": ("choice in the network",), "verification": ("verification",),
    "engines": ("whole engines", "engines in turns"),
}  # fmt: skip


def measure_case(name: str, batch: int, precision: str, calibrations: str, times: str) -> dict[str, Any]:
    """Builds in this process; returns the fields of a row."""
    from whet import zoo
    from whet.backends import get_backend
    from whet.builder import BuildConfig, build
    from whet.builder.precision.int8 import Calibration, build_int8
    from whet.frontends.onnx import network_from_onnx
    from whet.runtime import bind

    net = network_from_onnx(zoo.build(name, batch=batch) if precision == "fp16" else zoo.build(name))
    machine = get_backend("cuda")
    shape = {t.name: tuple(d if isinstance(d, int) else batch for d in t.shape) for t in net.inputs}
    profiles = ((shape, shape, shape),) if precision == "int8" else ()
    config = BuildConfig(backend="cuda", precisions=("fp16", "int8") if precision == "int8" else ("fp16",), profiles=profiles, timing_cache=times)
    begun = time.perf_counter()
    plan = build_int8(net, config, Calibration(cache=f"{calibrations}/{name}.json")) if precision == "int8" else build(net, config)
    took = time.perf_counter() - begun
    bound = bind(plan, machine)
    bound.run()
    spent = plan.report.phase_seconds
    named = {what: sum(spent.get(p, 0.0) for p in phases) for what, phases in PHASES.items()}
    return {
        "build_s": round(took, 2), **{f"{what}_s": round(s, 2) for what, s in named.items()},
        "other_s": round(took - sum(named.values()), 2), "ms": round(statistics.median(bound.seconds(100)[10:]) * 1e3, 4),
        "hits": plan.report.timing.hits, "misses": plan.report.timing.misses,
        "layers": len(plan.network.layers), "verified_layers": plan.report.verification.layers, "banned": len(plan.report.banned),
        "kept": plan.report.engines[0].what, "phases": {k: round(s, 3) for k, s in spent.items()},
        "choice": [[c.what, round(c.ms, 4), round(c.build_seconds, 2)] for c in plan.report.precision_choice],
        "gpu": machine.describe(),
    }  # fmt: skip


def rows_of(case: str, states: list[str], calibrations: str) -> Iterator[dict[str, Any]]:
    """One row per state of the caches, each from its own process; failures are recorded."""
    name, batch, precision = case.split(":")
    with tempfile.TemporaryDirectory() as folder:
        kernels = Path(folder, "kernels")
        kernels.mkdir(mode=0o700)
        if "empty" not in states:  # caches of this run, in a temporary folder
            for cubin in Path(os.environ["WHET_CUDA_CACHE"]).glob("*.cubin"):
                shutil.copyfile(cubin, kernels / cubin.name)
        times = ""
        for state in states:
            before = len(list(kernels.iterdir()))
            if state != "timings":  # otherwise the caches of the previous row
                times = f"{folder}/{state}.sqlite"
            begun = time.perf_counter()
            made = subprocess.run(
                [sys.executable, __file__, "--one", calibrations, times, name, batch, precision],
                env={**os.environ, "WHET_CUDA_CACHE": str(kernels)}, capture_output=True, text=True, check=False,
            )  # fmt: skip
            row: dict[str, Any] = {"case": f"{name} batch {batch} {precision}", "state": state, "known": KNOWN[state]}
            if made.returncode:
                row["failed"] = made.stderr.strip().splitlines()[-1][:500] if made.stderr.strip() else f"exit status {made.returncode}"
            else:
                took = round(time.perf_counter() - begun, 2)
                row |= json.loads(made.stdout.splitlines()[-1]) | {"process_s": took, "compiled": len(list(kernels.iterdir())) - before}
                bar = BARS.get(state) if case == "resnet50:1:fp16" else None
                row |= {} if bar is None else {"bar_s": bar, "within_bar": row["build_s"] <= bar}
            print({k: v for k, v in row.items() if k != "gpu"}, flush=True)
            yield row


def main() -> None:
    if sys.argv[1:2] == ["--one"]:
        calibrations, times, name, batch, precision = sys.argv[2:]
        print(json.dumps(measure_case(name, int(batch), precision, calibrations, times)))
        return
    if sys.argv[1:2] == ["--merge"]:
        RESULT.write_text(json.dumps([json.loads(Path(p).read_text()) for p in sys.argv[2:]], indent=1) + "\n")
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="+", metavar="NETWORK:BATCH:fp16|int8")
    parser.add_argument("--calibrations", default=".", help="folder of calibration files, one a network")
    parser.add_argument("--states", default="empty,kernels,timings")
    parser.add_argument("--out", type=Path, default=RESULT)
    given = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for row in (r for case in given.cases for r in rows_of(case, given.states.split(","), given.calibrations)):
        rows.append(row)
        gpu = next((r["gpu"] for r in rows if "gpu" in r), {})
        record = provenance(["numpy"]) | {"device": gpu.get("model", ""), "cpu_cores": len(os.sched_getaffinity(0))}
        record["versions"] |= {"driver": gpu.get("driver"), "nvrtc": gpu.get("nvrtc")}
        given.out.write_text(json.dumps(record | {"rows": [{k: v for k, v in r.items() if k != "gpu"} for r in rows]}, indent=1) + "\n")


if __name__ == "__main__":
    main()
