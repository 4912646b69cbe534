"""whet against ONNX Runtime and OpenVINO on the CPU, FP32 or BF16, in one run: zoo networks, paired and interleaved, in several processes.

`python benchmarks/cpu_peers.py [--precision bf16] [--cases resnet18:1,resnet18:8] [--processes 6] [--folder FOLDER] [--stage build|time]
[--out FILE]`

A case is a network of the zoo, or of the test data in $WHET_DATA, and a batch; NAME@32 is the network with inputs of 32 x 32. whet's engine is built
once and saved (`--stage build` stops there, `--stage time` takes what is in FOLDER); each process loads it together with the peers' sessions of the
same ONNX file, all with the same number of threads (of tiny networks whet builds engines with fewer threads too, and keeps the fastest), checks that
the outputs agree, and times interleaved blocks of inferences, forwards and backwards (a peer's threads may spin after a run, so each block starts
with a pause and discarded runs). Half of the processes start with whet, half with the last peer.
`ratio` is the better peer's time over whet's (above 1: whet is faster), the median over processes; `ratio_low` and `ratio_high` are its
95 % interval (order statistics). The peers are at their best settings (_cpu_runners.py); where OpenVINO's default precision hint is BF16, that is
shown too and does not count here. `others_cpus` is the largest external load of a process; one above 0.2 is repeated (at most twice), and a
row above it is `disturbed`. A row replaces the row of the same case in the result file and has its own date, commit and levels of the bars.

With `--precision bf16` whet may store and multiply BF16, OpenVINO is at its default precision hint, which must be BF16 on this CPU, ONNX Runtime
computes in FP32, and the faster counts. whet's error against ONNX Runtime may be at most twice OpenVINO's.
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
from _cpu_runners import (
    DISTURBED,
    OrtOptions,
    Run,
    as_record,
    openvino_default_precision,
    openvino_runner,
    ort_runner,
    require_even,
    tune_ort,
    verdict,
    whet_runner,
)
from _record import count_tactics, median_interval, replace_row

#: the goals, by network and batch; a batch that is not listed has the goal of the network's largest smaller one
BARS = {
    "resnet18": {1: 1.65, 8: 1.85}, "resnet34": {1: 1.65, 8: 1.85}, "vgg16": {1: 1.65, 8: 1.85}, "resnet50": {1: 1.2}, "yolov5s": {1: 1.3},
    "unet": {1: 1.3}, "mobilenet_v2": {1: 1.15}, "mobilenet_v3_large": {1: 1.15}, "efficientnet_b0": {1: 1.15}, "mobilenet_v2@32": {1: 1.1},
    "bert_base": {1: 1.0}, "vit_b_16": {1: 1.0}, "lenet5": {1: 1.1}, "resnet8_mlperftiny": {1: 1.1}, "resnet20_cifar10": {1: 1.1},
    "resnet56_cifar10": {1: 1.1},
}  # fmt: skip
TINY = 1.1  # the bar of tiny networks: whet's builder times them on fewer threads too
FOLDERS = {"resnet8_mlperftiny": "cifar10", "resnet20_cifar10": "cifar10", "resnet56_cifar10": "cifar10"}  # networks of the test data, 32 x 32
LEAST = 0.98  # for every other network
OPTIONS = {"bert_base": {"sequence": 128}}
CASES = ",".join(f"{n}:{b}" for b in (1, 8) for n in BARS)
BF16_BAR = 1.0  # of each network
BF16_NETWORKS = (
    "mobilenet_v2", "efficientnet_b0", "vit_b_16", "resnet18", "bert_base", "yolov5s", "resnet50", "mobilenet_v3_large", "unet", "resnet34",
)  # fmt: skip
BF16_CASES = ",".join(f"{n}:{b}" for b in (1, 8) for n in BF16_NETWORKS)
SEED = 11
PAUSE_SECONDS, BLOCK_SECONDS = 0.05, 0.25
ATTEMPTS = 3  # at a process without external load


def bar_of(name: str, batch: int, precision: str = "fp32") -> float:
    """The goal of a case."""
    if precision == "bf16":
        return BF16_BAR
    bars = {b: bar for b, bar in BARS.get(name, {}).items() if b <= batch}
    return bars[max(bars)] if bars else LEAST


def feed(inputs: dict[str, list]) -> dict[str, np.ndarray]:
    """name -> [NumPy type, *shape] as normal random values (ones for integers) in 64-byte aligned arrays, which all three read in place."""
    from whet.runtime import allocate_aligned_array

    rng, arrays = np.random.default_rng(SEED), {}
    for name, (dtype, *shape) in inputs.items():
        arrays[name] = allocate_aligned_array(tuple(shape), np.dtype(dtype))
        arrays[name][...] = rng.standard_normal(shape) if np.dtype(dtype).kind == "f" else 1
    return arrays


def save_model(name: str, batch: int, path: Path) -> None:
    """A network of the zoo, with inputs of SIZE x SIZE if the name ends with @SIZE, or of the test data."""
    import onnx

    import whet.zoo

    network, _, size = name.partition("@")
    if network in FOLDERS:
        model = onnx.load(Path(os.environ["WHET_DATA"]) / FOLDERS[network] / f"{network}.onnx")
    else:
        whet.zoo.save(network, path, batch=batch, **OPTIONS.get(network, {}))
        if not size:
            return
        model = onnx.load(path)
    batch_dim, *_, height, width = model.graph.input[0].type.tensor_type.shape.dim
    batch_dim.dim_value = batch
    if size:
        height.dim_value = width.dim_value = int(size)
    del model.graph.value_info[:]
    onnx.save(model, path)


#: openvino is at its default precision hint
RUNNERS = {"whet": whet_runner, "ort": ort_runner, "openvino": openvino_runner, "openvino_f32": partial(openvino_runner, precision="f32")}
#: the faster counts: in FP32, or in BF16 where a peer can
PEERS = {"fp32": ("ort", "openvino_f32"), "bf16": ("ort", "openvino")}
MOST_ERROR = {"fp32": 1e-3}  # against ONNX Runtime, relative to the largest result; in BF16 twice OpenVINO's


def load_runners(order: list[str], files: dict[str, Path], threads: int, ort: OrtOptions) -> dict[str, Run]:
    """The runners in this order. The engine has its own thread count, at most `threads`."""
    return {n: RUNNERS[n](files[n], 0 if n == "whet" else threads, *([ort] if n == "ort" else [])) for n in order}


def worker(args: argparse.Namespace) -> None:
    """One process: loads all three, checks them against each other, times them interleaved, prints JSON."""
    from whet.backends.cpu.load import watch

    arrays = feed(json.loads(args.inputs))
    names = ["whet", *PEERS["bf16"]]
    if args.precision == "fp32":
        names = [n for n in RUNNERS if n != "openvino" or openvino_default_precision() != "f32"]
    order = names if args.worker % 2 == 0 else names[::-1]
    files = {n: Path(args.engine if n == "whet" else args.model) for n in order}
    runners = load_runners(order, files, args.threads, OrtOptions(**json.loads(args.ort)))
    outs = {n: {k: np.array(v) for k, v in run(arrays).items()} for n, run in runners.items()}
    errors = {}
    compared = PEERS[args.precision][1]
    for n in (compared, "whet"):
        errors[n] = max(float(np.abs(outs[n][k] - ref).max() / np.abs(ref).max()) for k, ref in outs["ort"].items())
        most = MOST_ERROR.get(args.precision, 2 * errors[compared])
        assert errors[n] <= most, f"{n} and ONNX Runtime differ by {errors[n]}, more than {most}"
    times: dict[str, list[float]] = {n: [] for n in order}
    with watch() as load:
        start, r = time.perf_counter(), 0
        while r < 2 or (r < args.rounds and time.perf_counter() - start < args.seconds):
            for _ in range(2):  # forwards and backwards
                for n in order if r % 2 == 0 else order[::-1]:
                    times[n].extend(block(runners[n], arrays))
                r += 1
    row = {n: {"median": median(t), "p10": float(np.quantile(t, 0.1)), "p90": float(np.quantile(t, 0.9)), "runs": len(t)} for n, t in times.items()}
    print(json.dumps({"ms": row, "error": errors, "others_cpus": round(load.others or 0.0, 3), "first": order[0]}))


def block(run, arrays) -> list[float]:
    """Milliseconds of the inferences of one block."""
    time.sleep(PAUSE_SECONDS)
    once = 0.0
    for _ in range(2):
        if once < BLOCK_SECONDS:
            start = time.perf_counter()
            run(arrays)
            once = time.perf_counter() - start
    times = []
    for _ in range(max(2, min(60, int(BLOCK_SECONDS / once)))):
        start = time.perf_counter()
        run(arrays)
        times.append((time.perf_counter() - start) * 1e3)
    return times


def prepare(name: str, batch: int, args: argparse.Namespace, folder: Path) -> None:
    """Writes the model, the engine and facts about it to `folder`."""
    from whet.builder import BuildConfig, build
    from whet.builder.config import AUTO_THREADS
    from whet.engine import write_engine
    from whet.frontends import network_from_onnx

    model = folder / f"{name}-{batch}.onnx"
    save_model(name, batch, model)
    net = network_from_onnx(model)
    threads = AUTO_THREADS if bar_of(name, 1) == TINY else args.threads
    types = ("bf16",) if args.precision == "bf16" else ()
    config = BuildConfig(threads=threads, timing_cache=str(folder / "timings.sqlite"), optimization_level=args.level, precisions=types)
    plan = build(net, config)
    write_engine(plan, folder / f"{name}-{batch}.engine")
    facts = {
        "inputs": {t.name: [t.dtype.numpy.name, *(int(d) for d in t.shape)] for t in net.inputs},
        "build_seconds": round(plan.report.build_seconds, 2), "build_disturbed": len(plan.report.timing.disturbed_cpus), "level": args.level,
        "whet_threads": plan.threads, "tactics": count_tactics(plan),
    }  # fmt: skip
    (folder / f"{name}-{batch}.json").write_text(json.dumps(facts))
    print(f"{name} batch {batch}: built in {facts['build_seconds']} s, {facts['build_disturbed']} disturbed timings", flush=True)


def measure(name: str, batch: int, args: argparse.Namespace, folder: Path) -> dict:
    """The row of a case; its engine is in `folder`."""
    model, engine = folder / f"{name}-{batch}.onnx", folder / f"{name}-{batch}.engine"
    facts = json.loads((folder / f"{name}-{batch}.json").read_text())
    inputs = facts.pop("inputs")
    runs, ort = [], tune_ort(model, args.threads, feed(inputs))
    for i in range(args.processes):
        command = [sys.executable, __file__, "--worker", str(i), "--engine", str(engine), "--model", str(model), "--inputs", json.dumps(inputs)]
        command += ["--ort", json.dumps(asdict(ort)), "--threads", str(args.threads), "--rounds", str(args.rounds), "--seconds", str(args.seconds)]
        command += ["--precision", args.precision]
        tried: list[dict] = []
        while not tried or (tried[-1]["others_cpus"] > DISTURBED and len(tried) < ATTEMPTS):
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                raise SystemExit(done.stderr[-2000:])
            tried.append(json.loads(done.stdout.strip().splitlines()[-1]))
        runs.append(min(tried, key=lambda r: r["others_cpus"]))
    names, bar, peers = list(runs[0]["ms"]), bar_of(name, batch, args.precision), PEERS[args.precision]
    interval = ratio, low, high = median_interval([min(r["ms"][p]["median"] for p in peers) / r["ms"]["whet"]["median"] for r in runs])
    row = {"case": name, "batch": batch, "precision": args.precision}
    row |= {f"{n}_ms": round(median(r["ms"][n]["median"] for r in runs), 4) for n in sorted(names, key=list(RUNNERS).index)}
    row |= {"ratio": round(ratio, 4), "ratio_low": round(low, 4), "ratio_high": round(high, 4), "bar": bar}
    others = max(r["others_cpus"] for r in runs)
    row |= {"verdict": verdict(interval, bar, others), "ort_options": as_record(ort)}
    row |= {"threads": args.threads, "others_cpus": others, "error_against_ort": max(r["error"]["whet"] for r in runs)} | facts
    row |= {"processes": [{n: r["ms"][n] for n in names} | {"first": r["first"], "others_cpus": r["others_cpus"]} for r in runs]}
    times = "  ".join(f"{n} {row[f'{n}_ms']:.2f}" for n in names)
    band = f"{row['ratio']:.3f} ({row['ratio_low']:.3f}-{row['ratio_high']:.3f})"
    print(f"{name} batch {batch}: {times} ms  ratio {band}, bar {bar} {row['verdict']}, others {row['others_cpus']:.2f} CPUs", flush=True)
    return row


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--precision", choices=list(PEERS), default="fp32")
    p.add_argument("--cases", help="network:batch, separated by commas")
    p.add_argument("--threads", type=int, default=2)
    p.add_argument("--processes", type=int, default=6, help="even, and six at least: fewer hold no 95 %% interval")
    p.add_argument("--rounds", type=int, default=8)
    p.add_argument("--seconds", type=float, default=8.0, help="of a process: no further rounds after them, but at least two")
    p.add_argument("--level", type=int, default=3, help="builderOptimizationLevel")
    p.add_argument("--folder", help="where models, engines and the timing cache are kept; a temporary folder if not given")
    p.add_argument("--stage", choices=("build", "time"), help="only this stage")
    p.add_argument("--out", help="the result file; results/cpu/peers.json by default, with _bf16 for BF16")
    for hidden in ("worker", "engine", "model", "inputs", "ort"):
        p.add_argument(f"--{hidden}", help=argparse.SUPPRESS, type=int if hidden == "worker" else str)
    args = p.parse_args()
    if args.worker is not None:
        worker(args)
        return
    require_even(args.processes)
    is_bf16 = args.precision == "bf16"
    if is_bf16 and openvino_default_precision() != "bf16":
        raise SystemExit(f"OpenVINO's default precision hint is {openvino_default_precision()} on this CPU: there is nothing to compare BF16 with")
    from whet.backends import get_backend

    machine = {k: v for k, v in get_backend("cpu", threads=args.threads).describe().items() if k in ("model", "cpus", "caches", "loop")}
    default = Path(__file__).parent / "results" / "cpu" / ("peers_bf16.json" if is_bf16 else "peers.json")
    out, rows = Path(args.out or default), []
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(args.folder or temporary)
        folder.mkdir(parents=True, exist_ok=True)
        cases = args.cases or (BF16_CASES if is_bf16 else CASES)
        for name, _, batch in (case.partition(":") for case in cases.split(",")):
            if args.stage != "time":
                prepare(name, int(batch), args, folder)
            if args.stage != "build":
                rows.append(measure(name, int(batch), args, folder))
                replace_row(rows[-1], out, ("batch", "case"), ("numpy", "onnxruntime", "openvino", "onednn-cpu-gomp"), machine)
    if is_bf16 and rows:
        print(f"geometric mean {np.exp(np.mean([np.log(r['ratio']) for r in rows])):.3f}")
    met = [r for r in rows if r["verdict"] == "met"]
    print(f"{len(met)} of {len(rows)} meet the bar" + (f"; written to {os.path.relpath(out)}" if rows else ""))
    raise SystemExit(0 if len(met) == len(rows) else 1)


if __name__ == "__main__":
    main()
