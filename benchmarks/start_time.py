"""Engine start on the CPU against ONNX Runtime: process start to first inference, opening, rebuild from a warm timing cache, peak memory.

`python benchmarks/start_time.py [--networks resnet50,mobilenet_v2,vit_b_16] [--processes 7] [--threads 2] [--level 3] [--out FILE]`

Each network is built cold (with an empty timing cache) and saved twice, without and with packed weights. Then new processes alternate: whet,
whet with packed weights, ONNX Runtime on the same ONNX file; every process imports its library, opens the file and runs one inference. The times
are medians: `start` from the creation of the process to the first result, `open` and `first` (inference) are parts of it, `cpu` is user and system
time, which external load changes less. `peak_mib` is the largest resident set (VmHWM of /proc/self/status: a child inherits its parent's maximum in
getrusage). `rebuild` is a build in a new process after all measurements are in the timing cache, from reading the ONNX file to the written engine.
Files are in the page cache, compiled kernels in the user's cache: the first process of each kind warms them up and is not counted.
"""

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

from _record import alone, provenance

NETWORKS = "resnet50,mobilenet_v2,vit_b_16"
KINDS = ("whet", "whet_packed", "ort")
#: the goals for ResNet-50: seconds, and peak memory over ONNX Runtime's
BARS = {"start": 0.5, "rebuild": 3.0, "cold_build": 60.0, "peak_ratio": 1.5}


def open_and_run(kind: str, file: str, shapes: dict[str, list], threads: int) -> dict[str, float]:
    """In a new process: opens the file with one library and runs it once."""
    begin = time.monotonic()
    import numpy as np

    arrays = {name: np.ones(shape, dtype) for name, (dtype, *shape) in shapes.items()}
    if kind == "ort":
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads, options.inter_op_num_threads, options.log_severity_level = threads, 1, 3
        imported = time.monotonic()
        session = onnxruntime.InferenceSession(file, options, providers=["CPUExecutionProvider"])
        opened = time.monotonic()
        session.run(None, arrays)
    else:
        from whet.runtime import Runtime

        imported = time.monotonic()
        engine = Runtime("cpu", threads=threads).load(file)
        opened = time.monotonic()
        engine.run(arrays)
    end = time.monotonic()  # before the engine is closed; the clock is the same in all processes
    return {"import": imported - begin, "open": opened - imported, "first": end - opened, "end": end}


def build_again(model: str, engine: str, cache: str, threads: int, level: int) -> dict[str, float]:
    """In a new process: builds an engine and writes it, also with packed weights."""
    from whet.builder import BuildConfig, build
    from whet.engine import write_engine
    from whet.frontends import network_from_onnx
    from whet.runtime import Runtime

    begin = time.monotonic()
    plan = build(network_from_onnx(model), BuildConfig(threads=threads, timing_cache=cache, optimization_level=level))
    write_engine(plan, engine)
    seconds = time.monotonic() - begin
    Runtime().load(plan).save(f"{engine}.packed", packed_weights=True)
    return {"build": seconds, "end": time.monotonic()}


def run_process(*task: object) -> dict[str, float]:
    """The values of a task that runs in a new process: its own, and seconds until its end, CPU seconds and peak memory."""
    begin = time.monotonic()
    command = [sys.executable, __file__, "--task", json.dumps(task)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stderr[-2000:])
    values: dict[str, float] = json.loads(done.stdout.strip().splitlines()[-1])
    values["start"] = values.pop("end") - begin
    return values


def perform(task: list) -> None:
    """A child process: performs the task and prints its values."""
    name, *arguments = task
    values = (build_again if name == "build" else open_and_run)(*arguments)
    used = resource.getrusage(resource.RUSAGE_SELF)
    print(json.dumps(values | {"cpu": used.ru_utime + used.ru_stime, "peak_mib": peak_mib()}))


def peak_mib() -> float:
    """The largest resident set of this process since its program was started."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM:"))
    return int(line.split()[1]) / 1024


def measure(network: str, args: argparse.Namespace, folder: Path) -> dict[str, object]:
    """The row of a network."""
    import whet.zoo
    from whet.frontends import network_from_onnx

    model, engine, cache = folder / f"{network}.onnx", folder / f"{network}.engine", folder / "timings.sqlite"
    whet.zoo.save(network, model, batch=1)
    shapes = {t.name: [t.dtype.numpy.name, *(int(d) for d in t.shape)] for t in network_from_onnx(model).inputs}
    builds = [run_process("build", str(model), str(engine), str(cache), args.threads, args.level)["build"] for _ in range(args.builds + 1)]
    row: dict[str, object] = {"network": network, "threads": args.threads, "level": args.level}
    row |= {"cold_build_s": round(builds[0], 2), "rebuild_s": round(median(builds[1:]), 3)}
    files = {"whet": str(engine), "whet_packed": f"{engine}.packed", "ort": str(model)}
    runs: dict[str, list[dict[str, float]]] = {k: [] for k in KINDS}
    for i in range(args.processes + 1):
        for kind in KINDS if i % 2 else KINDS[::-1]:
            run = run_process("open", kind, files[kind], shapes, args.threads)
            if i:
                runs[kind].append(run)
    peaks: dict[str, float] = {}
    for kind, values in runs.items():
        medians = {k: median(v[k] for v in values) for k in values[0]}
        peaks[kind] = medians["peak_mib"]
        row |= {f"{kind}_{k if k == 'peak_mib' else f'{k}_s'}": round(v, 3) for k, v in medians.items()}
    row["peak_ratio"] = round(peaks["whet"] / peaks["ort"], 3)
    return row


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--networks", default=NETWORKS)
    p.add_argument("--processes", type=int, default=7, help="counted starts of each kind")
    p.add_argument("--builds", type=int, default=3, help="counted rebuilds")
    p.add_argument("--threads", type=int, default=2)
    p.add_argument("--level", type=int, default=3, help="builderOptimizationLevel")
    p.add_argument("--out", default=str(Path(__file__).parent / "results" / "cpu" / "start_time.json"))
    p.add_argument("--task", help=argparse.SUPPRESS)
    args = p.parse_args()
    if args.task:
        perform(json.loads(args.task))
        return
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for network in args.networks.split(","):
            rows.append(measure(network, args, Path(folder)))
            print(json.dumps(rows[-1]), flush=True)
    out = Path(args.out)
    with alone(out):
        record = provenance(("whet", "numpy", "llvmlite", "onnxruntime")) | {"bars": BARS, "rows": rows}
        out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
