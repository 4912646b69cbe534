"""whet against ONNX Runtime and OpenVINO on the CPU, FP32, in one run: zoo networks, paired and interleaved, in several processes.

`python benchmarks/cpu_peers.py [--models resnet18,resnet50] [--batches 1,8] [--processes 6] [--out FILE]`

whet's engine is built once and saved; each process loads it together with the peers' sessions of the same ONNX file, all with the same
number of threads, checks that the outputs agree, and times interleaved blocks of inferences, forwards and backwards (a peer's threads may spin
after a run, so each block starts with a pause and two discarded runs). Half of the processes start with whet, half with the last peer.
`ratio` is the better peer's time over whet's (above 1: whet is faster), the median over processes; `ratio_low` and `ratio_high` are its
95 % interval (order statistics). The peers are at their best settings (_cpu_runners.py); OpenVINO at its default precision hint, which may be
BF16, is shown beside and does not count here. `others_cpus` is the external load during the timing; a row is `disturbed` if it is above 0.2.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from functools import partial
from pathlib import Path
from statistics import median

import numpy as np
from _cpu_runners import OrtOptions, Run, as_record, openvino_runner, ort_runner, require_even, tune_ort, verdict, whet_runner
from _record import median_interval, provenance

BAR = 0.97
SEED = 11
PAUSE_SECONDS, BLOCK_SECONDS = 0.05, 0.25


def feed(inputs: dict[str, tuple[int, ...]]) -> dict[str, np.ndarray]:
    """Normal random values in 64-byte aligned arrays, which all three read without copies."""
    from whet.runtime import aligned_empty

    rng, arrays = np.random.default_rng(SEED), {}
    for name, shape in inputs.items():
        arrays[name] = aligned_empty(shape, np.float32)
        arrays[name][...] = rng.standard_normal(shape)
    return arrays


#: openvino is at its default precision hint
RUNNERS = {"whet": whet_runner, "ort": ort_runner, "openvino": openvino_runner, "openvino_f32": partial(openvino_runner, precision="f32")}
PEERS = ("ort", "openvino_f32")  # compute in FP32 as whet here; the faster counts


def load_runners(order: list[str], files: dict[str, Path], threads: int, ort: OrtOptions) -> dict[str, Run]:
    """The runners in this order."""
    return {n: RUNNERS[n](files[n], threads, *([ort] if n == "ort" else [])) for n in order}


def worker(args: argparse.Namespace) -> None:
    """One process: loads all three, checks them against each other, times them interleaved, prints JSON."""
    from whet.backends.cpu.load import watch

    arrays = feed({n: tuple(s) for n, s in json.loads(args.inputs).items()})
    order = list(RUNNERS) if args.worker % 2 == 0 else list(RUNNERS)[::-1]
    files = {n: Path(args.engine if n == "whet" else args.model) for n in order}
    runners = load_runners(order, files, args.threads, OrtOptions(**json.loads(args.ort)))
    outs = {n: {k: np.array(v) for k, v in run(arrays).items()} for n, run in runners.items()}
    errors = {}
    for n in ("whet", "openvino_f32"):
        errors[n] = max(float(np.abs(outs[n][k] - ref).max() / np.abs(ref).max()) for k, ref in outs["ort"].items())
        assert errors[n] < 1e-3, f"{n} and ONNX Runtime differ by {errors[n]}"
    times: dict[str, list[float]] = {n: [] for n in order}
    with watch() as load:
        for r in range(args.rounds):
            for n in order if r % 2 == 0 else order[::-1]:
                times[n].extend(block(runners[n], arrays))
    row = {n: {"median": median(t), "p10": float(np.quantile(t, 0.1)), "p90": float(np.quantile(t, 0.9)), "runs": len(t)} for n, t in times.items()}
    print(json.dumps({"ms": row, "error": errors, "others_cpus": round(load.others or 0.0, 3), "first": order[0]}))


def block(run, arrays) -> list[float]:
    """Milliseconds of the inferences of one block."""
    time.sleep(PAUSE_SECONDS)
    for _ in range(2):
        start = time.perf_counter()
        run(arrays)
        once = time.perf_counter() - start
    times = []
    for _ in range(max(3, min(60, int(BLOCK_SECONDS / once)))):
        start = time.perf_counter()
        run(arrays)
        times.append((time.perf_counter() - start) * 1e3)
    return times


def measure(name: str, batch: int, args: argparse.Namespace, folder: Path) -> dict:
    import whet.zoo
    from whet.builder import BuildConfig, build
    from whet.engine import write_engine
    from whet.frontends import network_from_onnx

    model, engine = folder / f"{name}-{batch}.onnx", folder / f"{name}-{batch}.engine"
    whet.zoo.save(name, model, batch=batch)
    net = network_from_onnx(model)
    shapes = {t.name: [int(d) for d in t.shape] for t in net.inputs}
    plan = build(net, BuildConfig(threads=args.threads, timing_cache=str(folder / "timings.sqlite"), optimization_level=args.level))
    write_engine(plan, engine)
    runs, ort = [], tune_ort(model, args.threads, feed({n: tuple(v) for n, v in shapes.items()}))
    for i in range(args.processes):
        command = [sys.executable, __file__, "--worker", str(i), "--engine", str(engine), "--model", str(model), "--inputs", json.dumps(shapes)]
        command += ["--ort", json.dumps(asdict(ort)), "--threads", str(args.threads), "--rounds", str(args.rounds)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(done.stderr[-2000:])
        runs.append(json.loads(done.stdout.strip().splitlines()[-1]))
    interval = ratio, low, high = median_interval([min(r["ms"][p]["median"] for p in PEERS) / r["ms"]["whet"]["median"] for r in runs])
    row = {"case": name, "batch": batch, "precision": "fp32"}
    row |= {f"{n}_ms": round(median(r["ms"][n]["median"] for r in runs), 4) for n in RUNNERS}
    row |= {"ratio": round(ratio, 4), "ratio_low": round(low, 4), "ratio_high": round(high, 4), "bar": BAR}
    others = max(r["others_cpus"] for r in runs)
    row |= {"verdict": verdict(interval, BAR, others), "ort_options": as_record(ort)}
    row |= {"threads": args.threads, "others_cpus": others, "error_against_ort": max(r["error"]["whet"] for r in runs)}
    row |= {"build_seconds": round(plan.report.build_seconds, 2), "build_disturbed": len(plan.report.timing.disturbed_cpus)}
    row |= {"processes": [{n: r["ms"][n] for n in RUNNERS} | {"first": r["first"], "others_cpus": r["others_cpus"]} for r in runs]}
    times = "  ".join(f"{n} {row[f'{n}_ms']:.2f}" for n in RUNNERS)
    band = f"{row['ratio']:.3f} ({row['ratio_low']:.3f}-{row['ratio_high']:.3f})"
    print(f"{name} batch {batch}: {times} ms  ratio {band}, bar {BAR} {row['verdict']}, others {row['others_cpus']:.2f} CPUs", flush=True)
    return row


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--models", default="resnet18,resnet50")
    p.add_argument("--batches", default="1,8")
    p.add_argument("--threads", type=int, default=2)
    p.add_argument("--processes", type=int, default=8, help="even, and six at least: fewer hold no 95 %% interval")
    p.add_argument("--rounds", type=int, default=8)
    p.add_argument("--level", type=int, default=3, help="builderOptimizationLevel")
    p.add_argument("--out", default=str(Path(__file__).parent / "results" / "cpu" / "peers.json"))
    for hidden in ("worker", "engine", "model", "inputs", "ort"):
        p.add_argument(f"--{hidden}", help=argparse.SUPPRESS, type=int if hidden == "worker" else str)
    args = p.parse_args()
    if args.worker is not None:
        worker(args)
        return
    require_even(args.processes)
    from whet.backends import get_backend

    with tempfile.TemporaryDirectory() as folder:
        rows = [measure(n, int(b), args, Path(folder)) for n in args.models.split(",") for b in args.batches.split(",")]
    result = {
        **provenance(("numpy", "onnxruntime", "openvino", "onednn-cpu-gomp")),
        "machine": {k: v for k, v in get_backend("cpu", threads=args.threads).describe().items() if k in ("model", "cpus", "caches", "loop")},
        "rows": rows,
    }
    out = Path(args.out)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(result, indent=1) + "\n")
    met = [r for r in rows if r["verdict"] == "met"]
    print(f"{len(met)} of {len(rows)} meet the bar; written to {os.path.relpath(out)}")
    raise SystemExit(0 if len(met) == len(rows) else 1)


if __name__ == "__main__":
    main()
