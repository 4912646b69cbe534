"""FP8 (e4m3) on a GPU: engines as built by --fp8, verified at their batch, against the FP16 and the INT8 engine, interleaved.

    python benchmarks/gpu_float8.py run FOLDER resnet50:1,8,128 ...      on a GPU: $OUT/float8.json
    python benchmarks/gpu_float8.py merge PART...                        results/h200/float8.json

FOLDER has the ranges written by `gpu_int8.py calibrate`. A row: the engine with FP8 in all eligible layers (fp8_ms), the same with the sums of
skip connections in FP16 (sums_ms; the form of --fp8 if the outputs lack decibels), the one with INT8 (int8_ms), the FP16 engine (fp16_ms), as
CUDA graphs in interleaved blocks; the number of layers in FP8, the scope of verification, the slowest layers. The weights are the zoo's
(random, of the real sizes): times are real, gpu_accuracy.py has the accuracy of FP8.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "src"))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from _record import provenance
from gpu_int8 import in_blocks, network

from whet.backends import get_backend
from whet.builder import BuildConfig, build
from whet.builder.precision.float8_ranges import insert_float8
from whet.builder.precision.int8 import Calibration, get_calibrated_ranges, prepare
from whet.builder.precision.permissions import is_float8
from whet.engine.plan import EnginePlan
from whet.engine.schema import encode
from whet.errors import WhetError
from whet.network import Network
from whet.precision import quantize
from whet.precision.float8 import list_excluded_layers, skip_sums
from whet.runtime import WeightStore, bind

RESULT = Path(__file__).parent / "results" / "h200" / "float8.json"
SLOWEST = 12


def engines(net: Network, batch: int, cache: Path, times: Path) -> dict[str, tuple[EnginePlan, float]]:
    """(engine, seconds of its build) by precision."""
    shape = {t.name: tuple(d if isinstance(d, int) else batch for d in t.shape) for t in net.inputs}
    config = BuildConfig(backend="cuda", profiles=((shape, shape, shape),), timing_cache=str(times))
    prepared = prepare(net, config)
    ranges = get_calibrated_ranges(net, prepared, Calibration(cache=str(cache)), config, print)
    built = {}
    wide = replace(ranges, float_sums=skip_sums(prepared, list_excluded_layers(prepared)))
    sources = {"fp8": insert_float8(prepared, ranges), "sums": insert_float8(prepared, wide), "int8": quantize(prepared, ranges), "fp16": net}
    for kind, source in sources.items():
        begun = time.perf_counter()
        precisions = ("fp16",) if kind == "fp16" else ("fp16", "int8" if kind == "int8" else "fp8")
        built[kind] = build(source, replace(config, precisions=precisions)), time.perf_counter() - begun
        print(f"{kind} batch {batch} built in {built[kind][1]:.1f} s", flush=True)
    return built


def row(name: str, batch: int, folder: Path, machine: Any) -> dict[str, Any]:
    """The figures of one network at one batch."""
    out = Path(os.environ.get("OUT", "."))
    made = engines(network(name), batch, folder / f"{name}.json", out / "times.sqlite")
    store, bounds = WeightStore(machine), {}
    for kind, (plan, _) in made.items():
        bounds[kind] = bind(plan, machine, store=store)
        bounds[kind].run()
    ms = dict(zip(made, map(statistics.median, in_blocks(list(bounds.values()))), strict=True))
    plan = made["fp8"][0]
    slow = sorted(zip(bounds["fp8"].run_timed(), plan.network.layers, strict=True), key=lambda x: -x[0])[:SLOWEST]
    verified = encode(plan.report.verification)
    return {
        "case": f"{name} batch {batch}", "network": name, "batch": batch, **{f"{k}_ms": round(v, 4) for k, v in ms.items()},
        "images_per_s": round(1e3 * batch / ms["fp8"]), "float8_layers": sum(map(is_float8, plan.network.layers)), "layers": len(plan.network.layers),
        "verified": {k: verified[k] for k in ("layers", "images", "worst_layer", "network_error", "network_bound", "turned_error")},
        "banned": plan.report.banned, "build_s": {k: round(s, 1) for k, (_, s) in made.items()}, "state": machine.state(),
        "slowest_us": [[x.name, plan.choices[x.name].tactic, plan.choices[x.name].implementation, round(1e6 * s, 2)] for s, x in slow],
    }  # fmt: skip


def run(folder: Path, wanted: list[str]) -> None:
    """Rows as they are measured; a network that cannot be built is recorded with its reason."""
    machine, rows = get_backend("cuda"), []
    part = Path(os.environ.get("OUT", ".")) / "float8.json"
    for name, _, batches in (word.partition(":") for word in wanted):
        for batch in map(int, batches.split(",")):
            try:
                rows.append(row(name, batch, folder, machine))
            except WhetError as error:
                rows.append({"case": f"{name} batch {batch}", "network": name, "batch": batch, "failed": f"{type(error).__name__}: {error}"[:2000]})
            print({k: v for k, v in rows[-1].items() if k not in ("slowest_us", "state")}, flush=True)
            part.write_text(json.dumps({**provenance(["numpy"]), "gpu": machine.describe(), "rows": rows}, indent=1))
            for name_, tactic, implementation, us in rows[-1].get("slowest_us", []):
                print(f"   {us:8.2f} {tactic} {implementation[:70]} {name_[:50]}")


def merge(parts: list[Path]) -> None:
    """One result file of several runs, each with its own date, commit and command."""
    runs = [
        {
            "what": __doc__.splitlines()[0], "date": f["date"], "commit": f["commit"], "command": f["command"], "versions": f["versions"],
            "machine": f["gpu"], "data": "ranges of real photos (gpu_int8.py calibrate); the zoo's random weights", "rows": f["rows"],
        }
        for f in (json.loads(p.read_text()) for p in parts)
    ]  # fmt: skip
    RESULT.write_text(json.dumps(runs, indent=1) + "\n")
    print(RESULT, sum(len(r["rows"]) for r in runs), "rows")


if __name__ == "__main__":
    if len(sys.argv) < 3 or sys.argv[1] not in ("run", "merge"):
        sys.exit(__doc__)
    if sys.argv[1] == "merge":
        merge([Path(p) for p in sys.argv[2:]])
    else:
        run(Path(sys.argv[2]), sys.argv[3:])
