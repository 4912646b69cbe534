"""Networks of torchvision, timm and transformers, exported by PyTorch, on the CPU: outputs and time against ONNX Runtime.

`python benchmarks/cpu_exports.py [--networks resnet18,...] [--exporters torchscript,dynamo] [--level 3] [--threads 2] [--folder FOLDER] [--out FILE]`

A process per network and exporter exports it with random weights (models are kept in FOLDER), builds an engine, compares all outputs with ONNX
Runtime's (`error`: the maximum difference relative to the largest value) and times both interleaved, forwards and backwards. `ratio` is ONNX
Runtime's time over whet's. `numpy_layers` are the layers that run in NumPy. A network that cannot be exported is listed with the exporter's
message and does not count. `others_cpus` is the external load during the timing; a row is disturbed above 0.2, and decides nothing then.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from _cpu_runners import DISTURBED, ort_runner, whet_runner
from _networks import EXPORTERS, NETWORKS, Maker, export, timm_network, torchvision_network
from _record import provenance

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


def exported(name: str, exporter: str, folder: Path) -> tuple[Path, dict[str, np.ndarray]]:
    """The model's file and its inputs; both are made once."""
    model, data = folder / f"{name}-{exporter}.onnx", folder / f"{name}-{exporter}.npz"
    if not data.exists():
        import torch

        torch.manual_seed(0)
        net, named = ALL[name](1)
        export(net.eval(), named, str(model), (exporter,))
        np.savez(data, **{n: np.asarray(v) for n, v in named.items()})
    with np.load(data) as arrays:
        return model, {n: arrays[n] for n in arrays.files}


def worker(name: str, exporter: str, args: argparse.Namespace) -> dict[str, Any]:
    """The row of a network: `stage` is the last thing that was done."""
    row: dict[str, Any] = {"case": name, "exporter": exporter, "threads": args.threads, "level": args.level, "stage": "export"}
    folder = Path(args.folder)
    try:
        model, arrays = exported(name, exporter, folder)
        row["stage"] = "build"
        from whet.backends.cpu.load import watch
        from whet.builder import BuildConfig, build
        from whet.engine import write_engine
        from whet.frontends import network_from_onnx
        from whet.runtime import allocate_aligned_array

        cache = str(folder / "timings.sqlite")
        plan = build(network_from_onnx(model), BuildConfig(threads=args.threads, timing_cache=cache, optimization_level=args.level))
        write_engine(plan, folder / f"{name}-{exporter}.engine")
        row |= {"stage": "run", "build_seconds": round(plan.report.build_seconds, 1), "layers": len(plan.network.layers)}
        row["numpy_layers"] = sorted(n for n, c in plan.choices.items() if c.tactic == "cpu/numpy_reference")
        inputs = {t.name for t in plan.network.inputs}
        feeds = {}
        for n, a in arrays.items():
            if n in inputs:
                feeds[n] = allocate_aligned_array(a.shape, a.dtype)
                feeds[n][...] = a
        runs = {"whet": whet_runner(folder / f"{name}-{exporter}.engine", args.threads), "ort": ort_runner(model, args.threads)}
        outs = {n: {k: np.array(v, np.float64) for k, v in run(feeds).items()} for n, run in runs.items()}
        row["error"] = max(float(np.abs(outs["whet"][k] - ref).max() / max(np.abs(ref).max(), 1e-30)) for k, ref in outs["ort"].items())
        times: dict[str, list[float]] = {n: [] for n in runs}
        with watch() as load:
            for r in range(ROUNDS):
                for n in list(runs)[:: 1 if r % 2 == 0 else -1]:
                    times[n].append(median(timed(runs[n], feeds)))
        row |= {"stage": "done", "others_cpus": round(load.others or 0.0, 3)}
        row |= {f"{n}_ms": round(median(t), 4) for n, t in times.items()}
        row["ratio"] = round(median(o / w for o, w in zip(times["ort"], times["whet"], strict=True)), 3)
    except Exception as e:  # noqa: BLE001 - exporters, torch and builds raise exceptions of many classes; each is a row
        row["message"] = f"{type(e).__name__}: {e}"[:400]
    return row


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
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
    p.add_argument("--timeout", type=float, default=300.0, help="seconds for a network")
    p.add_argument("--folder", help="where models, engines and the timing cache are kept; a temporary folder if not given")
    p.add_argument("--out", default=str(Path(__file__).parent / "results" / "cpu" / "exports.json"))
    p.add_argument("--worker", help=argparse.SUPPRESS)
    args = p.parse_args()
    if args.worker:
        print(json.dumps(worker(*args.worker.split(":"), args)))
        return
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.folder or temporary
        rows = []
        for exporter in args.exporters.split(","):
            for name in args.networks.split(","):
                command = [sys.executable, __file__, "--worker", f"{name}:{exporter}", "--folder", folder]
                command += ["--level", str(args.level), "--threads", str(args.threads)]
                try:
                    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=args.timeout)
                    failed = {"stage": "crash", "message": done.stderr[-400:]}
                    row = failed if done.returncode else json.loads(done.stdout.strip().splitlines()[-1])
                except subprocess.TimeoutExpired:
                    row = {"stage": "crash", "message": f"no result after {args.timeout:g} s"}
                row = {"case": name, "exporter": exporter} | row
                rows.append(row)
                print(json.dumps({k: v for k, v in row.items() if k not in ("threads", "level")}), flush=True)
                result = {**provenance(("numpy", "onnxruntime", "torch")), "summary": summary(rows), "rows": rows}
                Path(args.out).write_text(json.dumps(result, indent=1) + "\n")
    print(summary(rows))


if __name__ == "__main__":
    main()
