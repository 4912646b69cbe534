"""whet's INT8 against ONNX Runtime's and OpenVINO's on the CPU: zoo networks, paired and interleaved, in several processes.

`python benchmarks/cpu_int8.py [--models resnet18,resnet50] [--batches 1,8] [--processes 6] [--out FILE]`

ONNX Runtime runs what its own static quantization writes (QDQ, weights by channel). OpenVINO runs what NNCF makes of the model where
nncf is installed, else ONNX Runtime's QDQ file; the row says which. All calibrate on the same seeded samples. whet's engine is the one
that `--int8` builds: floating point where that is faster. SNR is against ONNX Runtime's FP32 outputs on an input that none calibrated on.
Ratios are a peer's time over whet's (above 1: whet is faster), the median over processes.
"""

import argparse
import datetime
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import numpy as np
from cpu_peers import RUNNERS, SEED, block, feed

BARS = {"ort": 1.2, "openvino": 1.03}
CALIBRATION = 8


def calibration(shapes: dict[str, list[int]]) -> list[dict[str, np.ndarray]]:
    """The same samples for all: normal numbers, other ones than those that are timed and judged."""
    rng = np.random.default_rng(SEED + 1)
    return [{n: rng.standard_normal(s).astype(np.float32) for n, s in shapes.items()} for _ in range(CALIBRATION)]


def ort_quantized(model: Path, shapes: dict[str, list[int]]) -> Path:
    """The QDQ model that ONNX Runtime's static quantization writes."""
    from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_static
    from onnxruntime.quantization.shape_inference import quant_pre_process

    class Reader(CalibrationDataReader):
        def __init__(self):
            self.left = iter(calibration(shapes))

        def get_next(self):
            return next(self.left, None)

    prepared, made = model.with_suffix(".prepared.onnx"), model.with_suffix(".qdq.onnx")
    quant_pre_process(str(model), str(prepared), skip_symbolic_shape=True)
    quantize_static(str(prepared), str(made), Reader(), quant_format=QuantFormat.QDQ, per_channel=True,
                    activation_type=QuantType.QUInt8, weight_type=QuantType.QInt8)  # fmt: skip
    return made


def openvino_quantized(model: Path, shapes: dict[str, list[int]], qdq: Path) -> tuple[Path, str]:
    """What OpenVINO shall run, and where it comes from."""
    try:
        import nncf
    except ImportError:
        return qdq, "ONNX Runtime's QDQ file (nncf is not installed)"
    import openvino as ov

    made = nncf.quantize(ov.Core().read_model(str(model)), nncf.Dataset(calibration(shapes)))
    path = model.with_suffix(".nncf.xml")
    ov.save_model(made, str(path), compress_to_fp16=False)
    return path, "NNCF"


def worker(args: argparse.Namespace) -> None:
    """One process: loads all three, times them in turns, prints times and SNR as JSON."""
    from whet.backends.cpu.load import busy_seconds, own_seconds

    arrays = feed({n: tuple(s) for n, s in json.loads(args.inputs).items()})
    files = dict(zip(RUNNERS, args.files.split(","), strict=True))
    order = list(RUNNERS) if args.worker % 2 == 0 else list(RUNNERS)[::-1]
    runners = {n: RUNNERS[n](Path(files[n]), args.threads) for n in order}
    truth = list(RUNNERS["ort"](Path(args.model), args.threads)(arrays).values())
    snr = {}
    for n, run in runners.items():
        noise = sum(float(np.sum((np.asarray(a, np.float64) - t) ** 2)) for a, t in zip(run(arrays).values(), truth, strict=True))
        snr[n] = round(10 * np.log10(sum(float(np.sum(t.astype(np.float64) ** 2)) for t in truth) / max(noise, 1e-30)), 2)
    times: dict[str, list[float]] = {n: [] for n in order}
    busy, own, start = busy_seconds() or 0.0, own_seconds(), time.perf_counter()
    for r in range(args.rounds):
        for n in order if r % 2 == 0 else order[::-1]:
            times[n].extend(block(runners[n], arrays))
    others = ((busy_seconds() or 0.0) - busy - (own_seconds() - own)) / (time.perf_counter() - start)
    print(json.dumps({"ms": {n: median(t) for n, t in times.items()}, "snr_db": snr, "others_cpus": round(max(0.0, others), 3)}))


def measure(name: str, batch: int, args: argparse.Namespace, folder: Path) -> dict:
    import whet.zoo
    from whet.builder import BuildConfig
    from whet.builder.quantized import Calibration, build_int8
    from whet.engine import write_engine
    from whet.frontends import network_from_onnx

    model, engine = folder / f"{name}-{batch}.onnx", folder / f"{name}-{batch}.engine"
    whet.zoo.save(name, model, batch=batch)
    net = network_from_onnx(model)
    shapes = {t.name: [int(d) for d in t.shape] for t in net.inputs}
    precisions = ("int8", "bf16") if args.best else ("int8",)
    config = BuildConfig(threads=args.threads, timing_cache=str(folder / "timings.sqlite"), optimization_level=args.level, precisions=precisions)
    plan = build_int8(net, config, Calibration(samples=lambda: calibration(shapes)))
    write_engine(plan, engine)
    qdq = ort_quantized(model, shapes)
    openvino, origin = openvino_quantized(model, shapes, qdq)
    files = ",".join(map(str, (engine, qdq, openvino)))
    runs = []
    for i in range(args.processes):
        command = [sys.executable, __file__, "--worker", str(i), "--files", files, "--model", str(model), "--inputs", json.dumps(shapes)]
        done = subprocess.run([*command, "--threads", str(args.threads), "--rounds", str(args.rounds)], capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(done.stderr[-2000:])
        runs.append(json.loads(done.stdout.strip().splitlines()[-1]))
    row = {"case": name, "batch": batch, "openvino_model": origin, "kept": next(c for c in plan.report["precision_choice"] if c["kept"])["what"]}
    row |= {f"{n}_ms": round(median(r["ms"][n] for r in runs), 4) for n in RUNNERS}
    row |= {f"{n}_snr_db": runs[0]["snr_db"][n] for n in RUNNERS}
    row |= {f"ratio_{p}": round(median(r["ms"][p] / r["ms"]["whet"] for r in runs), 4) for p in BARS}
    row |= {"threads": args.threads, "others_cpus": max(r["others_cpus"] for r in runs), "processes": runs}
    shown = "  ".join(f"{n} {row[f'{n}_ms']:.2f} ms {row[f'{n}_snr_db']:.1f} dB" for n in RUNNERS)
    ratios = ", ".join(f"{row[f'ratio_{p}']:.3f} of {p}" for p in BARS)
    print(f"{name} batch {batch}: {shown}  ratio {ratios}, others {row['others_cpus']:.2f} CPUs", flush=True)
    return row


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--models", default="resnet18,resnet50,mobilenet_v2,yolov5s,efficientnet_b0")
    p.add_argument("--batches", default="1,8")
    p.add_argument("--threads", type=int, default=2)
    p.add_argument("--processes", type=int, default=6, help="at least 5 for a result to be committed")
    p.add_argument("--rounds", type=int, default=8)
    p.add_argument("--level", type=int, default=3, help="builderOptimizationLevel")
    p.add_argument("--best", action="store_true", help="permit BF16 too")
    p.add_argument("--out", default=str(Path(__file__).parent / "results" / "cpu" / "int8.json"))
    for hidden in ("worker", "files", "model", "inputs"):
        p.add_argument(f"--{hidden}", help=argparse.SUPPRESS, type=int if hidden == "worker" else str)
    args = p.parse_args()
    if args.worker is not None:
        worker(args)
        return
    from whet.backends import get_backend

    with tempfile.TemporaryDirectory() as folder:
        rows = [measure(n, int(b), args, Path(folder)) for n in args.models.split(",") for b in args.batches.split(",")]
    means = {f"geomean_{q}": round(float(np.exp(np.mean([np.log(r[f"ratio_{q}"]) for r in rows]))), 4) for q in BARS}
    machine = get_backend("cpu", threads=args.threads).describe()
    commit = subprocess.run(["git", "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True, check=False, cwd=Path(__file__).parent)
    result = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": commit.stdout.strip(),
        "command": " ".join(["python", "benchmarks/cpu_int8.py", *sys.argv[1:]]),
        "machine": {k: v for k, v in machine.items() if k in ("model", "cpus", "caches", "loop")},
        **means,
        "bars": BARS,
        "rows": rows,
    }
    out = Path(args.out)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(result, indent=1) + "\n")
    print(f"{means}; written to {os.path.relpath(out)}")
    raise SystemExit(0 if all(means[f"geomean_{q}"] >= bar for q, bar in BARS.items()) else 1)


if __name__ == "__main__":
    main()
