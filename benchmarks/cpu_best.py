"""`--best` (a precision per layer) on the CPU against every fixed precision: whet's own, ONNX Runtime's, OpenVINO's. Paired, interleaved.

`python benchmarks/cpu_best.py [--models resnet18,...] [--batches 1,8] [--processes 6] [--stage prepare|make|time|all --folder DIR] [--out FILE]`

whet: the engine of `--best` with calibration, and engines in FP32, BF16 (if the CPU has instructions for it) and of `--int8`. ONNX Runtime:
FP32, and its static quantization (QDQ). OpenVINO: the float model and NNCF's quantization (INT8), each at its default precision hint and at f32.
All in one process, interleaved, forwards and
backwards, in several processes. A ratio is a fixed precision's time over that of `--best` (above 1: `--best` is faster): the median
over processes and its 95 % interval (order statistics). `least` is the smallest of a row. The files are those of cpu_int8.py: its
`--stage prepare` fills the folder too, and an `--int8` engine from its `--stage make` is reused (the same build). A row is written as soon as
it is timed, replacing that of the same network and batch in the result file; each has the date of its timing.
"""

import argparse
import datetime
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import cpu_int8
import numpy as np
from _cpu_runners import DISTURBED, OrtOptions, Run, openvino_runner, ort_runner, require_even, tune_ort, verdict, whet_runner
from _record import alone, median_interval, provenance
from cpu_peers import PAUSE_SECONDS

BLOCK_SECONDS, MOST_RUNS = 0.12, 30
#: precisions of whet's fixed engines
FIXED = {"whet_fp32": (), "whet_bf16": ("bf16",), "whet_int8": ("int8",)}
TIED = 0.99  # if `--best` selected one of our fixed precisions, both engines are the same and the ratio is 1 within the noise


#: name -> (suffix of its file after the case's name, loader)
RUNNERS: dict[str, tuple[str, Callable[[Path, int], Run]]] = {
    "best": ("best.engine", whet_runner),
    **{n: (f"{n}.engine", whet_runner) for n in FIXED},
    "ort_fp32": ("onnx", ort_runner),
    "ort_int8": ("qdq.onnx", ort_runner),
    "openvino_fp32": ("onnx", partial(openvino_runner, precision="f32")),
    "openvino": ("onnx", openvino_runner),
    "openvino_int8_f32": ("nncf.xml", partial(openvino_runner, precision="f32")),
    "openvino_int8": ("nncf.xml", openvino_runner),
}


def runners() -> list[str]:
    """The runners supported by this CPU's instructions."""
    from whet.backends import get_backend

    narrow = "avx512_bf16" in get_backend("cpu").capabilities.features
    return [n for n in RUNNERS if narrow or not n.endswith("bf16")]


def make(name: str, batch: int, args: argparse.Namespace, folder: Path) -> None:
    """Builds whet's engines. Selection is by time, so the machine should be idle; a shared timing cache gives `--best` most of its times."""
    from whet.builder import BuildConfig, build
    from whet.builder.precision.int8 import Calibration, build_int8
    from whet.engine import write_engine
    from whet.engine.schema import encode
    from whet.frontends import network_from_onnx

    case = folder / f"{name}-{batch}"
    cache, net = Path(f"{case}.calibration.json"), network_from_onnx(f"{case}.onnx")
    if not cache.exists():  # build_int8 would use synthetic ranges
        raise SystemExit(f"{cache} is missing: run --stage prepare first")
    about = Path(f"{case}.best.json")
    said = json.loads(about.read_text()) if about.exists() else {}
    for runner in (n for n in ("best", *FIXED) if n in runners() and (not args.engines or n in args.engines.split(","))):
        written, theirs = Path(f"{case}.{runner}.engine"), Path(f"{case}.engine")
        if args.missing and written.exists():
            continue
        if runner == "whet_int8" and theirs.exists():
            shutil.copy(theirs, written)
            said[runner] = {"build_seconds": None, "choice": [], "from": "cpu_int8.py --stage make"}
            about.write_text(json.dumps(said))
            print(f"{name} batch {batch}, {runner}: as cpu_int8.py made it", flush=True)
            continue
        precisions = FIXED.get(runner, ("best",))
        config = BuildConfig(threads=args.threads, timing_cache=str(folder / "timings.sqlite"), optimization_level=args.level, precisions=precisions)
        start = time.perf_counter()
        integers = precisions in (("best",), ("int8",))
        plan = build_int8(net, config, Calibration(cache=str(cache))) if integers else build(net, config)
        write_engine(plan, written)
        said[runner] = {"build_seconds": round(time.perf_counter() - start, 1), "choice": encode(plan.report.precision_choice)}
        kept = next((c["what"] for c in said[runner]["choice"] if c["kept"]), "as permitted")
        print(f"{name} batch {batch}, {runner}: {said[runner]['build_seconds']} s; {kept}", flush=True)
        about.write_text(json.dumps(said))


def block(run: Run, arrays: dict[str, np.ndarray]) -> list[float]:
    """Milliseconds per inference of one block, after a pause and one discarded run."""
    time.sleep(PAUSE_SECONDS)
    times = []
    for _ in range(2):
        start = time.perf_counter()
        run(arrays)
        times.append(time.perf_counter() - start)
    del times[0]
    while sum(times) < BLOCK_SECONDS and len(times) < MOST_RUNS:
        start = time.perf_counter()
        run(arrays)
        times.append(time.perf_counter() - start)
    return [t * 1e3 for t in times]


def worker(args: argparse.Namespace) -> None:
    """One process: loads all, times them interleaved, prints times and SNR as JSON."""
    from whet.backends.cpu.load import watch

    arrays = cpu_int8.feed(json.loads(args.inputs))
    order = runners() if args.worker % 2 == 0 else runners()[::-1]
    ort = {n: OrtOptions(**o) for n, o in json.loads(args.ort).items()}
    runs = {n: RUNNERS[n][1](Path(f"{args.case}.{RUNNERS[n][0]}"), args.threads, *([ort[n]] if n in ort else [])) for n in order}
    truth = {k: np.array(v) for k, v in runs["ort_fp32"](arrays).items()}
    snr = {n: round(snr_of(truth, run(arrays)), 2) for n, run in runs.items()}
    times: dict[str, list[float]] = {n: [] for n in order}
    with watch() as load:
        for r in range(args.rounds):
            for n in order if r % 2 == 0 else order[::-1]:
                times[n].extend(block(runs[n], arrays))
    print(json.dumps({"ms": {n: round(median(t), 4) for n, t in times.items()}, "snr_db": snr, "others_cpus": round(load.others or 0.0, 3)}))


def snr_of(truth: dict[str, np.ndarray], got: dict[str, np.ndarray]) -> float:
    """SNR in dB over all outputs together, as in cpu_int8.py."""
    noise = sum(float(np.sum((np.asarray(a, np.float64) - t) ** 2)) for a, t in zip(got.values(), truth.values(), strict=True))
    return float(10 * np.log10(sum(float(np.sum(t.astype(np.float64) ** 2)) for t in truth.values()) / max(noise, 1e-30)))


def measure(name: str, batch: int, args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """The row of one network and batch size, from the files of `make`."""
    case = folder / f"{name}-{batch}"
    said, inputs = json.loads(Path(f"{case}.best.json").read_text()), json.loads(Path(f"{case}.json").read_text())["inputs"]
    runs, arrays = [], cpu_int8.feed(inputs)
    ort = {n: asdict(tune_ort(Path(f"{case}.{RUNNERS[n][0]}"), args.threads, arrays)) for n in ("ort_fp32", "ort_int8")}
    for i in range(args.processes):
        command = [sys.executable, __file__, "--worker", str(i), "--ort", json.dumps(ort), "--case", str(case), "--inputs", json.dumps(inputs)]
        done = subprocess.run([*command, "--threads", str(args.threads), "--rounds", str(args.rounds)], capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(done.stderr[-2000:])
        runs.append(json.loads(next(line for line in done.stdout.splitlines()[::-1] if line.startswith("{"))))
    names = list(runs[0]["ms"])
    fixed = [n for n in runners() if n in names and n != "best"]
    ratios = {n: median_interval([r["ms"][n] / r["ms"]["best"] for r in runs]) for n in fixed}
    row: dict[str, Any] = {"case": name, "batch": batch, "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")}
    row["kept"] = next(c["what"] for c in said["best"]["choice"] if c["kept"])
    row |= {f"{n}_ms": round(median(r["ms"][n] for r in runs), 4) for n in ("best", *fixed)}
    row |= {f"ratio_{n}": round(v[0], 4) for n, v in ratios.items()}
    row |= {f"ratio_{n}_interval": [round(v[1], 4), round(v[2], 4)] for n, v in ratios.items()}
    row["least"] = min(row[f"ratio_{n}"] for n in fixed)
    row["least_of"] = min(fixed, key=lambda n: row[f"ratio_{n}"])
    row["verdict"] = verdict(ratios[row["least_of"]], TIED, max(r["others_cpus"] for r in runs))
    row["ort_options"] = ort
    row["snr_db"] = {n: runs[0]["snr_db"][n] for n in ("best", *fixed) if not n.endswith("fp32")}
    row |= {"threads": args.threads, "others_cpus": max(r["others_cpus"] for r in runs), "built": said, "processes": runs}
    shown = ", ".join(f"{n} {row[f'{n}_ms']:.2f}" for n in ("best", *fixed))
    least = f"least ratio {row['least']:.3f} of {row['least_of']}"
    print(f"{name} batch {batch}: {shown} ms; {least}; others {row['others_cpus']:.2f}; {row['kept']}", flush=True)
    return row


def record(rows: list[dict[str, Any]], args: argparse.Namespace) -> bool:
    """Writes the result file, keeping rows of earlier runs; True if no fixed precision is faster than `--best` in the rows that count."""
    with alone(Path(args.out)):
        return _record(rows, args)


def _record(rows: list[dict[str, Any]], args: argparse.Namespace) -> bool:
    from whet.backends import get_backend

    out = Path(args.out)
    old = json.loads(out.read_text())["rows"] if out.exists() else []
    told = provenance(["numpy", "onnxruntime", "openvino", "nncf", "onednn-cpu-gomp"])
    rows = [{**r, "commit": told["commit"], "command": told["command"]} for r in rows]
    new = {(r["case"], r["batch"]) for r in rows}
    rows = sorted([*(r for r in old if (r["case"], r["batch"]) not in new), *rows], key=lambda r: (r["batch"], r["case"]))
    timed = [r for r in rows if r["others_cpus"] <= DISTURBED]
    machine = get_backend("cpu", threads=args.threads).describe()
    means = {}
    for n in RUNNERS:
        values = [r[f"ratio_{n}"] for r in timed if f"ratio_{n}" in r]
        if values:
            means[n] = round(float(np.exp(np.mean(np.log(values)))), 4)
    result = {
        **told,
        "machine": {k: v for k, v in machine.items() if k in ("model", "cpus", "caches", "loop")},
        "geomean_of_fixed_over_best": means,
        "least": min((r["least"] for r in timed), default=None),
        "bars": {"geomean": 1.0, "least": TIED},
        "rows": rows,
    }
    out.write_text(json.dumps(result, indent=1) + "\n")
    print(f"geometric means of a fixed precision's time over that of --best: {means}; {len(timed)} of {len(rows)} rows count")
    return bool(timed) and len(timed) == len(rows) and min(means.values()) >= 1 and all(r.get("verdict") == "met" for r in timed)


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--models", default="resnet18,resnet50,mobilenet_v2,yolov5s,efficientnet_b0,bert_base")
    p.add_argument("--batches", default="1,8")
    p.add_argument("--threads", type=int, default=2)
    p.add_argument("--processes", type=int, default=6, help="even; six are the fewest that hold a 95 %% interval")
    p.add_argument("--rounds", type=int, default=1, help="blocks of each runner in a process; every second process goes backwards")
    p.add_argument("--level", type=int, default=3, help="builderOptimizationLevel")
    p.add_argument("--engines", default="", help="which of whet's engines to make: best, whet_fp32, ... (default: all)")
    p.add_argument("--missing", action="store_true", help="--stage make: leave engines alone that are there, as after a run that was cut short")
    p.add_argument("--out", default=str(Path(__file__).parent / "results" / "cpu" / "best.json"))
    p.add_argument("--stage", choices=("prepare", "make", "time", "all"), default="all")
    p.add_argument("--folder", help="where the files lie between the stages")
    for hidden in ("worker", "case", "inputs", "ort"):
        p.add_argument(f"--{hidden}", help=argparse.SUPPRESS, type=int if hidden == "worker" else str)
    args = p.parse_args()
    if args.worker is not None:
        worker(args)
        return
    require_even(args.processes)
    args.best = True  # needed by cpu_int8's stages
    cases = [(n, int(b)) for n in args.models.split(",") for b in args.batches.split(",")]
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(args.folder or temporary)
        folder.mkdir(parents=True, exist_ok=True)
        for stage, work in (("prepare", cpu_int8.peers), ("prepare", cpu_int8.calibrate), ("make", make)):
            if args.stage in (stage, "all"):
                for name, batch in cases:
                    work(name, batch, args, folder)
        if args.stage in ("time", "all"):
            met = [record([measure(n, b, args, folder)], args) for n, b in cases]
            raise SystemExit(0 if met[-1] else 1)


if __name__ == "__main__":
    main()
