"""Engines of whet's own CPU kernels alone, against engines that may use oneDNN too and against ONNX Runtime, FP32.

`python benchmarks/cpu_without_onednn.py [--networks resnet18,...] [--level 2] [--threads 2] [--folder FOLDER] [--stage build|time] [--out FILE]`

`--stage build` builds the engines in FOLDER, `--stage time` times them there, on a machine that nothing else uses; without it both are done. A
network is one of the zoo, or FOLDER/NAME.onnx. Engines and ONNX Runtime, at its best options for the network, are timed interleaved, forwards and
backwards, in one process; times are medians of blocks. `kept` is the time of the engine with oneDNN over that of the engine without it (above 0.97 is
the goal); `ratio` is ONNX Runtime's time over that of the faster engine. `numpy_layers` of the engine without oneDNN run in NumPy.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from _cpu_runners import DISTURBED, as_record, ort_runner, tune_ort, whet_runner
from _record import provenance
from cpu_exports import timed
from cpu_peers import OPTIONS

NETWORKS = (
    "resnet18,resnet34,resnet50,resnext50_32x4d,vgg16,mobilenet_v2,mobilenet_v3_large,efficientnet_b0,squeezenet1_1,yolov5s,unet,bert_base,vit_b_16"
)
ENGINES: dict[str, tuple[str, ...]] = {"with": (), "without": ("-ONEDNN",)}


def build_engines(name: str, args: argparse.Namespace, folder: Path) -> None:
    import whet.zoo
    from whet.builder import BuildConfig, build
    from whet.engine import write_engine
    from whet.frontends import network_from_onnx

    model = folder / f"{name}.onnx"
    if not model.exists():
        whet.zoo.save(name, model, batch=1, **OPTIONS.get(name, {}))
    net, facts = network_from_onnx(model), {}
    for engine, sources in ENGINES.items():
        options: dict[str, Any] = {"threads": args.threads, "timing_cache": str(folder / "timings.sqlite"), "optimization_level": args.level}
        plan = build(net, BuildConfig(tactic_sources=sources, **options))
        write_engine(plan, folder / f"{name}.{engine}.engine")
        facts[f"{engine}_build_seconds"] = round(plan.report.build_seconds, 1)
        facts[f"{engine}_numpy_layers"] = sorted(n for n, c in plan.choices.items() if c.tactic == "cpu/numpy_reference")
        facts[f"{engine}_error"] = plan.report.verification.network_error
    facts["shapes"] = {t.name: [str(t.dtype), *(int(d) for d in t.shape)] for t in net.inputs}
    (folder / f"{name}.json").write_text(json.dumps(facts))


def feeds_of(shapes: dict[str, list[Any]]) -> dict[str, np.ndarray]:
    """Normal random values; small integers for inputs of indices and masks."""
    from whet.runtime import allocate_aligned_array

    rng, arrays = np.random.default_rng(11), {}
    for name, (dtype, *shape) in shapes.items():
        if dtype == "f32":
            arrays[name] = allocate_aligned_array(tuple(shape), np.float32)
            arrays[name][...] = rng.standard_normal(shape)
        else:
            arrays[name] = allocate_aligned_array(tuple(shape), np.int64)
            arrays[name][...] = 1
    return arrays


def time_network(name: str, args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    from whet.backends.cpu.load import watch

    facts = json.loads((folder / f"{name}.json").read_text())
    feeds = feeds_of(facts.pop("shapes"))
    runs = {engine: whet_runner(folder / f"{name}.{engine}.engine", args.threads) for engine in ENGINES}
    chosen = tune_ort(folder / f"{name}.onnx", args.threads, feeds)
    runs["ort"] = ort_runner(folder / f"{name}.onnx", args.threads, chosen)
    outs = {n: {k: np.array(v, np.float64) for k, v in run(feeds).items()} for n, run in runs.items()}
    row: dict[str, Any] = {"case": name, "batch": 1, "threads": args.threads, "ort_options": as_record(chosen)}
    for engine in ENGINES:
        row[f"{engine}_error_against_ort"] = max(float(np.abs(outs[engine][k] - ref).max() / np.abs(ref).max()) for k, ref in outs["ort"].items())
    times: dict[str, list[float]] = {n: [] for n in runs}
    with watch() as load:
        for r in range(args.rounds):
            for n in list(runs)[:: 1 if r % 2 == 0 else -1]:
                times[n].append(median(timed(runs[n], feeds)))
    row |= {f"{n}_ms": round(median(t), 4) for n, t in times.items()}
    row["kept"] = round(median(a / b for a, b in zip(times["with"], times["without"], strict=True)), 3)
    row["ratio"] = round(median(o / min(a, b) for o, a, b in zip(times["ort"], times["with"], times["without"], strict=True)), 3)
    row["others_cpus"] = round(load.others or 0.0, 3)
    row["disturbed"] = row["others_cpus"] > DISTURBED
    return row | facts


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--networks", default=NETWORKS)
    p.add_argument("--level", type=int, default=2, help="builderOptimizationLevel")
    p.add_argument("--threads", type=int, default=2)
    p.add_argument("--rounds", type=int, default=8)
    p.add_argument("--folder", help="where models and engines are kept; a temporary folder if not given")
    p.add_argument("--stage", choices=("build", "time"), help="only this stage")
    p.add_argument("--out", default=str(Path(__file__).parent / "results" / "cpu" / "without_onednn.json"))
    args = p.parse_args()
    from whet.backends import get_backend

    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(args.folder or temporary)
        folder.mkdir(parents=True, exist_ok=True)
        names, rows = args.networks.split(","), []
        for name in names if args.stage != "time" else ():
            build_engines(name, args, folder)
            print(f"{name} built", flush=True)
        for name in names if args.stage != "build" else ():
            rows.append(time_network(name, args, folder))
            print(json.dumps({k: v for k, v in rows[-1].items() if "numpy_layers" not in k}), flush=True)
            machine = {k: v for k, v in get_backend("cpu", threads=args.threads).describe().items() if k in ("model", "cpus", "caches", "loop")}
            result = {**provenance(("numpy", "onnxruntime", "onednn-cpu-gomp")), "machine": machine, "rows": rows}
            Path(args.out).write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
