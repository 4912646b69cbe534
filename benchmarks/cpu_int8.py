"""whet's INT8 against ONNX Runtime's and OpenVINO's on the CPU: zoo networks, paired and interleaved, in several processes.

`python benchmarks/cpu_int8.py [--models resnet18,resnet50] [--batches 1,8] [--processes 6] [--stage STAGE --folder DIR] [--out FILE]`

ONNX Runtime runs the output of its static quantization (QDQ, per-channel weights). OpenVINO runs the output of NNCF if nncf is installed,
otherwise ONNX Runtime's QDQ file; the row names it. It runs at its default precision hint and at f32 for the float parts, and the faster counts.
Both peers are at their best settings (_cpu_runners.py). All calibrate on the same seeded samples. whet's engine is that of `--int8`: floating point
if that is faster. SNR is against ONNX Runtime's FP32 outputs on an input that is not used for calibration. Ratios are a peer's time over
whet's (above 1: whet is faster), the median over processes. `peers` writes the models and the peers' quantized forms into a folder,
`calibrate` whet's ranges (both: `prepare`); `make` builds whet's engines there, selected by time, so that external load makes the selection
worse; `time` times the engines of the folder. A model whose engine cannot be built is a row with its reason.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from statistics import median

import numpy as np
from _cpu_runners import DISTURBED, OrtOptions, as_record, mean_interval, ort_runner, require_even, tune_ort, verdict
from _record import count_tactics, median_interval, provenance
from cpu_peers import RUNNERS, SEED, block, load_runners

BARS = {"ort": 1.2, "openvino": 1.03}
LEAST = 0.97  # of the better peer, for every network
OPENVINO = ("openvino", "openvino_f32")  # the faster counts as OpenVINO
CALIBRATION = 8  # images or texts, for every batch size
SEQUENCE = 128
VOCABULARY = 30000
Shapes = dict[str, list[int]]


def sample(shapes: Shapes, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Normal random values; for text models token ids, with a mask that includes all of them."""
    arrays = {}
    for name, shape in shapes.items():
        if "mask" in name:
            arrays[name] = np.ones(shape, np.int64)
        elif "ids" in name:
            arrays[name] = rng.integers(0, 2 if "type" in name else VOCABULARY, shape)
        else:
            arrays[name] = rng.standard_normal(shape).astype(np.float32)
    return arrays


def feed(shapes: Shapes) -> dict[str, np.ndarray]:
    """The sample for timing and evaluation, in 64-byte aligned arrays, which all three read without copies."""
    from whet.runtime import allocate_aligned_array

    arrays = {}
    for name, a in sample(shapes, np.random.default_rng(SEED)).items():
        arrays[name] = allocate_aligned_array(a.shape, a.dtype)
        arrays[name][...] = a
    return arrays


def calibration(shapes: Shapes) -> list[dict[str, np.ndarray]]:
    """The same samples for all, different from the sample for timing and evaluation."""
    rng, batch = np.random.default_rng(SEED + 1), next(iter(shapes.values()))[0]
    return [sample(shapes, rng) for _ in range(max(1, CALIBRATION // batch))]


def ort_quantized(model: Path, shapes: Shapes) -> Path:
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


def openvino_quantized(model: Path, shapes: Shapes, qdq: Path) -> tuple[Path, str]:
    """The model that OpenVINO runs, and its origin."""
    try:
        import nncf
    except ImportError:
        return qdq, "ONNX Runtime's QDQ file (nncf is not installed)"
    import openvino as ov

    settings = {"model_type": nncf.ModelType.TRANSFORMER} if any("ids" in n for n in shapes) else {}
    made = nncf.quantize(ov.Core().read_model(str(model)), nncf.Dataset(calibration(shapes)), **settings)
    path = model.with_suffix(".nncf.xml")
    ov.save_model(made, str(path), compress_to_fp16=False)
    return path, "NNCF"


def worker(args: argparse.Namespace) -> None:
    """One process: loads all three, times them interleaved, prints times and SNR as JSON."""
    from whet.backends.cpu.load import watch

    arrays = feed(json.loads(args.inputs))
    whet, qdq, openvino = map(Path, args.files.split(","))
    files = {"whet": whet, "ort": qdq, **dict.fromkeys(OPENVINO, openvino)}
    order = list(RUNNERS) if args.worker % 2 == 0 else list(RUNNERS)[::-1]
    runners = load_runners(order, files, args.threads, OrtOptions(**json.loads(args.ort)))
    truth = list(ort_runner(Path(args.model), args.threads)(arrays).values())
    snr = {}
    for n, run in runners.items():
        noise = sum(float(np.sum((np.asarray(a, np.float64) - t) ** 2)) for a, t in zip(run(arrays).values(), truth, strict=True))
        snr[n] = round(10 * np.log10(sum(float(np.sum(t.astype(np.float64) ** 2)) for t in truth) / max(noise, 1e-30)), 2)
    times: dict[str, list[float]] = {n: [] for n in order}
    start = time.perf_counter()
    with watch() as load:
        for r in range(args.rounds):
            for n in order if r % 2 == 0 else order[::-1]:
                times[n].extend(block(runners[n], arrays))
            if r % 2 and time.perf_counter() - start > args.seconds:  # equally often forwards and backwards
                break
    print(json.dumps({"ms": {n: median(t) for n, t in times.items()}, "snr_db": snr, "others_cpus": round(load.others or 0.0, 3)}))


def peers(name: str, batch: int, args: argparse.Namespace, folder: Path) -> None:
    """Writes the model and the peers' files into the folder, under any machine load."""
    import whet.zoo
    from whet.frontends import network_from_onnx

    model = folder / f"{name}-{batch}.onnx"
    whet.zoo.save(name, model, batch=batch, **({"sequence": SEQUENCE} if name.startswith("bert") else {}))
    shapes = {t.name: [int(d) for d in t.shape] for t in network_from_onnx(model).inputs}
    qdq = ort_quantized(model, shapes)
    openvino, origin = openvino_quantized(model, shapes, qdq)
    said = {"case": name, "batch": batch, "inputs": shapes, "openvino_model": origin, "files": [f"{name}-{batch}.engine", qdq.name, openvino.name]}
    (folder / f"{name}-{batch}.json").write_text(json.dumps(said))


def calibrate(name: str, batch: int, args: argparse.Namespace, folder: Path) -> None:
    """Writes whet's ranges into the folder, replacing existing ones: minutes for the large networks, under any machine load."""
    from whet.builder.precision.int8 import Calibration, get_calibrated_ranges, prepare
    from whet.frontends import network_from_onnx

    model = folder / f"{name}-{batch}.onnx"
    net, cache, config = network_from_onnx(model), model.with_suffix(".calibration.json"), engine_config(args, folder)
    shapes = {t.name: [int(d) for d in t.shape] for t in net.inputs}
    cache.unlink(missing_ok=True)
    get_calibrated_ranges(net, prepare(net, config), Calibration(lambda: calibration(shapes), str(cache)), config, print)


def engine_config(args: argparse.Namespace, folder: Path):
    from whet.builder import BuildConfig

    precisions = ("int8", "bf16") if args.best else ("int8",)
    return BuildConfig(threads=args.threads, timing_cache=str(folder / "timings.sqlite"), optimization_level=args.level, precisions=precisions)


def make(name: str, batch: int, args: argparse.Namespace, folder: Path) -> None:
    """Builds whet's engine from the ranges of `calibrate`; selection is by time, so the machine should be idle."""
    from whet.builder.precision.int8 import Calibration, build_int8
    from whet.engine import write_engine
    from whet.errors import WhetError
    from whet.frontends import network_from_onnx

    path, net = folder / f"{name}-{batch}.json", network_from_onnx(folder / f"{name}-{batch}.onnx")
    cache = folder / f"{name}-{batch}.calibration.json"
    if not cache.exists():  # build_int8 would use synthetic ranges, and the SNR would be meaningless
        raise SystemExit(f"{cache} is missing: run --stage calibrate first")
    said = {k: v for k, v in json.loads(path.read_text()).items() if k != "failed"}
    try:
        plan = build_int8(net, engine_config(args, folder), Calibration(cache=str(cache)))
        write_engine(plan, folder / said["files"][0])
        said["kept"] = next(c for c in plan.report.precision_choice if c.kept).what
        said["build_seconds"], said["tactics"] = round(plan.report.build_seconds, 1), count_tactics(plan)
    except WhetError as error:
        said["failed"] = str(error)[:500]
    path.write_text(json.dumps(said))


def measure(name: str, batch: int, args: argparse.Namespace, folder: Path) -> dict:
    """The row of one network and batch size, from the files of `make`."""
    said = json.loads((folder / f"{name}-{batch}.json").read_text())
    row = {k: said[k] for k in ("case", "batch", "openvino_model", "kept", "build_seconds", "tactics", "failed") if k in said}
    if "failed" in said:
        print(f"{name} batch {batch}: {said['failed']}", flush=True)
        return row
    files, model = ",".join(str(folder / f) for f in said["files"]), folder / f"{name}-{batch}.onnx"
    runs, ort = [], tune_ort(folder / said["files"][1], args.threads, feed(said["inputs"]))
    for i in range(args.processes):
        under = os.environ.get("WHET_BENCH_UNDER", "").split()  # command prefix of each timing: a lock, taskset
        command = [*under, sys.executable, __file__, "--worker", str(i), "--ort", json.dumps(asdict(ort)), "--files", files, "--model", str(model)]
        command += ["--inputs", json.dumps(said["inputs"])]
        command += ["--threads", str(args.threads), "--rounds", str(args.rounds), "--seconds", str(args.seconds)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(done.stderr[-2000:])
        runs.append(json.loads(next(line for line in done.stdout.splitlines()[::-1] if line.startswith("{"))))
    row |= {f"{n}_ms": round(median(r["ms"][n] for r in runs), 4) for n in RUNNERS}
    row |= {f"{n}_snr_db": runs[0]["snr_db"][n] for n in RUNNERS}
    others = max(r["others_cpus"] for r in runs)
    for p in BARS:
        interval = median_interval([times_of(r["ms"])[p] / r["ms"]["whet"] for r in runs])
        row |= {f"ratio_{p}{end}": round(v, 4) for end, v in zip(("", "_low", "_high"), interval, strict=True)}
    better = median_interval([min(times_of(r["ms"]).values()) / r["ms"]["whet"] for r in runs])
    row |= {f"ratio_better_peer{end}": round(v, 4) for end, v in zip(("", "_low", "_high"), better, strict=True)}
    row |= {"verdict": verdict(better, LEAST, others), "ort_options": as_record(ort)}
    row |= {"threads": args.threads, "others_cpus": others, "processes": runs}
    shown = "  ".join(f"{n} {row[f'{n}_ms']:.2f} ms {row[f'{n}_snr_db']:.1f} dB" for n in RUNNERS)
    ratios = ", ".join(f"{row[f'ratio_{p}']:.3f} of {p}" for p in BARS)
    print(f"{name} batch {batch}: {shown}  ratio {ratios}, others {row['others_cpus']:.2f} CPUs; {row['kept']}", flush=True)
    return row


def times_of(ms: dict[str, float]) -> dict[str, float]:
    """Milliseconds of each peer: OpenVINO's are those of its faster precision hint."""
    return {"ort": ms["ort"], "openvino": min(ms[n] for n in OPENVINO)}


def record(rows: list[dict], args: argparse.Namespace) -> bool:
    """Writes the result file; True if all bars are met."""
    from whet.backends import get_backend

    timed = [r for r in rows if "failed" not in r and r["others_cpus"] <= DISTURBED]
    if not timed:
        raise SystemExit(f"nothing was timed undisturbed (others took more than {DISTURBED} CPUs in every row): no result is written")
    means = {q: mean_interval([[times_of(r["ms"])[q] / r["ms"]["whet"] for r in row["processes"]] for row in timed]) for q in BARS}
    machine = get_backend("cpu", threads=args.threads).describe()
    result = {
        **provenance(["numpy", "onnxruntime", "openvino", "nncf", "onednn-cpu-gomp"]),
        "machine": {k: v for k, v in machine.items() if k in ("model", "cpus", "caches", "loop")},
        **{f"geomean_{q}{end}": round(v, 4) for q, m in means.items() for end, v in zip(("", "_low", "_high"), m, strict=True)},
        "verdicts": {q: verdict(means[q], bar, 0.0) for q, bar in BARS.items()},
        "bars": {**BARS, "least_of_better": LEAST},
        "rows": rows,
    }
    out = Path(args.out)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(result, indent=1) + "\n")
    print(f"{ {q: [round(v, 4) for v in m] for q, m in means.items()} }; written to {os.path.relpath(out)}")
    print(f"{len(timed)} of {len(rows)} rows count")
    met = all(verdict(means[q], bar, 0.0) == "met" for q, bar in BARS.items()) and all(r["verdict"] == "met" for r in timed)
    return met and len(timed) == len(rows)


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--models", default="resnet18,resnet50,mobilenet_v2,yolov5s,efficientnet_b0,bert_base")
    p.add_argument("--batches", default="1,8")
    p.add_argument("--threads", type=int, default=2)
    p.add_argument("--processes", type=int, default=6, help="even, and six at least: fewer hold no 95 %% interval")
    p.add_argument("--rounds", type=int, default=8)
    p.add_argument("--seconds", type=float, default=12, help="of a process, after which no more rounds begin")
    p.add_argument("--level", type=int, default=3, help="builderOptimizationLevel")
    p.add_argument("--best", action="store_true", help="permit BF16 too")
    p.add_argument("--out", default=str(Path(__file__).parent / "results" / "cpu" / "int8.json"))
    p.add_argument("--stage", choices=("peers", "calibrate", "prepare", "make", "time", "all"), default="all")
    p.add_argument("--folder", help="where the files lie between the stages")
    for hidden in ("worker", "files", "model", "inputs", "ort"):
        p.add_argument(f"--{hidden}", help=argparse.SUPPRESS, type=int if hidden == "worker" else str)
    args = p.parse_args()
    if args.worker is not None:
        worker(args)
        return
    require_even(args.processes)
    cases = [(n, int(b)) for n in args.models.split(",") for b in args.batches.split(",")]
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(args.folder or temporary)
        folder.mkdir(parents=True, exist_ok=True)
        for stages, work in ((("peers", "prepare"), peers), (("calibrate", "prepare"), calibrate), (("make",), make)):
            if args.stage in (*stages, "all"):
                for name, batch in cases:
                    work(name, batch, args, folder)
        if args.stage in ("time", "all"):
            raise SystemExit(0 if record([measure(n, b, args, folder) for n, b in cases], args) else 1)


if __name__ == "__main__":
    main()
