"""Networks of torchvision, timm and transformers, exported by PyTorch, on the CPU: outputs and time against ONNX Runtime.

`python benchmarks/cpu_exports.py [--networks resnet18,...] [--exporters torchscript,dynamo] [--folder FOLDER] [--stage export|build|time]`

A process per network and exporter and stage: `export` writes the model with random weights, `build` an engine, `time` compares all outputs
with ONNX Runtime's (`error`: the maximum difference relative to the largest value) and times both interleaved, forwards and backwards; without
`--stage` each is done that FOLDER lacks. `ratio` is ONNX Runtime's time over whet's. `numpy_layers` are the layers that run in NumPy.
A network that cannot be exported is listed with the exporter's message and does not count. `others_cpus` is the external load during the timing; a
row is disturbed above 0.2, and decides nothing then. A row replaces that of the same network and exporter in the result file, and has its own
date and commit.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from _cpu_runners import DISTURBED, ort_runner, whet_runner
from _networks import EXPORTERS, NETWORKS, Maker, export, timm_network, torchvision_network
from _record import replace_row

SKIPPED = ("bert_large_384", "bert_base_384", "unet3d_64", "efficientnet_b4")  # larger versions of others in the list, and minutes on a CPU
TORCHVISION = ("resnet18", "resnet34", "mobilenet_v2", "squeezenet1_1", "mnasnet1_0", "alexnet", "googlenet")
TIMM = (
    "skresnet18", "resnest14d", "efficientvit_b0", "ghostnetv2_100", "tf_efficientnet_lite0", "eca_nfnet_l0", "fbnetc_100", "poolformer_s12",
    "mixer_s32_224", "repvgg_a0", "hardcorenas_a", "lcnet_050", "rexnet_100", "xcit_nano_12_p16_224", "focalnet_tiny_srf",
)  # fmt: skip
MORE: dict[str, Maker] = {n: torchvision_network(n) for n in TORCHVISION} | {n: timm_network(n) for n in TIMM}
MORE["edgenext_xx_small"] = timm_network("edgenext_xx_small", 256)
ALL = {n: m for n, m in NETWORKS.items() if n not in SKIPPED} | MORE
TOLERANCE = 1e-4
ROUNDS, BLOCK_SECONDS = 6, 0.15


def timed(run: Any, arrays: dict[str, np.ndarray]) -> list[float]:
    """Milliseconds of the inferences of one block, after two that are discarded."""
    for _ in range(2):
        start = time.perf_counter()
        run(arrays)
        once = time.perf_counter() - start
    times = []
    for _ in range(max(2, min(40, int(BLOCK_SECONDS / once)))):
        start = time.perf_counter()
        run(arrays)
        times.append(1e3 * (time.perf_counter() - start))
    return times


def write_model(name: str, exporter: str, stem: Path) -> None:
    """The stage `export`: STEM.onnx, and its inputs in STEM.npz."""
    import torch

    torch.manual_seed(0)
    net, named = ALL[name](1)
    export(net.eval(), named, f"{stem}.onnx", (exporter,))
    np.savez(f"{stem}.npz", **{n: np.asarray(v) for n, v in named.items()})


def build_engine(stem: Path, args: argparse.Namespace) -> None:
    """The stage `build`: STEM.engine, and facts of the build in STEM.json."""
    from whet.builder import BuildConfig, build
    from whet.engine import write_engine
    from whet.frontends import network_from_onnx

    config = BuildConfig(threads=args.threads, timing_cache=str(stem.parent / "timings.sqlite"), optimization_level=args.level)
    plan = build(network_from_onnx(f"{stem}.onnx"), config)
    write_engine(plan, f"{stem}.engine")
    facts: dict[str, Any] = {"threads": args.threads, "level": args.level, "build_seconds": round(plan.report.build_seconds, 1)}
    facts |= {"layers": len(plan.network.layers), "numpy_layers": sorted(n for n, c in plan.choices.items() if c.tactic == "cpu/numpy_reference")}
    Path(f"{stem}.json").write_text(json.dumps(facts))


def time_engine(stem: Path, args: argparse.Namespace) -> dict[str, Any]:
    """The stage `time`: the row's error, times and ratio."""
    from whet.backends.cpu.load import watch
    from whet.runtime import Runtime, allocate_aligned_array

    row = json.loads(Path(f"{stem}.json").read_text())
    with Runtime().load(f"{stem}.engine") as engine:
        inputs = set(engine.inputs)
    feeds = {}
    with np.load(f"{stem}.npz") as arrays:
        for n in inputs & set(arrays.files):
            feeds[n] = allocate_aligned_array(arrays[n].shape, arrays[n].dtype)
            feeds[n][...] = arrays[n]
    runs = {"whet": whet_runner(Path(f"{stem}.engine"), args.threads), "ort": ort_runner(Path(f"{stem}.onnx"), args.threads)}
    outs = {n: {k: np.array(v, np.float64) for k, v in run(feeds).items()} for n, run in runs.items()}
    row["error"] = max(float(np.abs(outs["whet"][k] - ref).max() / max(np.abs(ref).max(), 1e-30)) for k, ref in outs["ort"].items())
    times: dict[str, list[float]] = {n: [] for n in runs}
    with watch() as load:
        for r in range(ROUNDS):
            for n in list(runs)[:: 1 if r % 2 == 0 else -1]:
                times[n].append(median(timed(runs[n], feeds)))
    row |= {f"{n}_ms": round(median(t), 4) for n, t in times.items()}
    row |= {"ratio": round(median(o / w for o, w in zip(times["ort"], times["whet"], strict=True)), 3), "others_cpus": round(load.others or 0.0, 3)}
    return row


STAGES = {"export": ".npz", "build": ".json", "time": ""}  # with the ending of the file that is written last


def do_stage(name: str, exporter: str, stage: str, args: argparse.Namespace) -> dict[str, Any]:
    """What a stage adds to the row: `stage` is the last one that was begun, `done` if all were."""
    stem = Path(args.folder) / f"{name}-{exporter}"
    try:
        if stage == "export":
            write_model(name, exporter, stem)
        elif stage == "build":
            build_engine(stem, args)
        else:
            return {"stage": "done"} | time_engine(stem, args)
    except Exception as e:  # noqa: BLE001 - exporters, torch and builds raise exceptions of many classes; each is a row
        return {"stage": stage, "message": f"{type(e).__name__}: {e}"[:400]}
    return {"stage": stage}


def run_stages(name: str, exporter: str, stages: Sequence[str], args: argparse.Namespace) -> dict[str, Any]:
    """The row of a network after the stages that its files lack, each in a process."""
    row: dict[str, Any] = {"case": name, "exporter": exporter}
    for stage in stages:
        if STAGES[stage] and (Path(args.folder) / f"{name}-{exporter}{STAGES[stage]}").exists():
            continue
        command = [sys.executable, __file__, "--worker", f"{name}:{exporter}:{stage}", "--folder", args.folder]
        command += ["--level", str(args.level), "--threads", str(args.threads)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=args.timeout)
            row |= {"stage": stage, "message": done.stderr[-400:]} if done.returncode else json.loads(done.stdout.strip().splitlines()[-1])
        except subprocess.TimeoutExpired:
            row |= {"stage": stage, "message": f"no result after {args.timeout:g} s"}
        if "message" in row:
            break
    return row


def summarize(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """How many of the exported models are right, and ratios of the rows that were not disturbed."""
    counted = [r for r in rows if r["stage"] != "export"]
    ratios = [r["ratio"] for r in counted if r["stage"] == "done" and r["others_cpus"] <= DISTURBED]
    found = {"models": len(counted), "networks": len({r["case"] for r in counted})}
    found["right"] = sum(r.get("error", math.inf) <= TOLERANCE for r in counted)
    if ratios:
        found |= {"undisturbed": len(ratios), "geometric_mean": round(math.exp(sum(map(math.log, ratios)) / len(ratios)), 3), "least": min(ratios)}
    return found


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--networks", default=",".join(ALL))
    p.add_argument("--exporters", default=",".join(EXPORTERS))
    p.add_argument("--level", type=int, default=3, help="builderOptimizationLevel")
    p.add_argument("--threads", type=int, default=2)
    p.add_argument("--timeout", type=float, default=300.0, help="seconds for a stage of a network")
    p.add_argument("--folder", help="where models, engines and the timing cache are kept; a temporary folder if not given")
    p.add_argument("--stage", choices=tuple(STAGES), help="only this stage")
    p.add_argument("--out", default=str(Path(__file__).parent / "results" / "cpu" / "exports.json"))
    p.add_argument("--worker", help=argparse.SUPPRESS)
    args = p.parse_args()
    if args.worker:
        print(json.dumps(do_stage(*args.worker.split(":"), args)))
        return
    stages = [args.stage] if args.stage else list(STAGES)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as temporary:
        args.folder = args.folder or temporary
        Path(args.folder).mkdir(parents=True, exist_ok=True)
        for exporter in args.exporters.split(","):
            for name in args.networks.split(","):
                row = run_stages(name, exporter, stages, args)
                print(json.dumps(row), flush=True)
                if row.get("stage") == "done" or "message" in row:
                    rows = replace_row(row, Path(args.out), ("exporter", "case"), ("numpy", "onnxruntime", "onednn-cpu-gomp"))
    print(summarize(rows))


if __name__ == "__main__":
    main()
