"""whet and its peers on one GPU, interleaved within one process: FP16 networks with FP16 images on the device, both as CUDA graphs.

GPU time of isolated replays by events, in rounds that alternate between whet's engine (verified at its batch), torch eager in a CUDA graph and
torch.compile (max-autotune, captured in a CUDA graph too, so that no input copy is included). A row is the median over all rounds of two
processes with its 95 % interval, and the median of the ratios within the rounds. The first process loads whet first, the second torch.compile:
memory is the GPU memory (NVML) used by the side that was loaded first, after the CUDA context: weights, activations, kernels, workspaces.

Usage: python3 benchmarks/gpu_peers.py --warm [--rows yolov5s:1,resnet50:1,...] [--budget SECONDS] [--gpus N] [--compiled FOLDER]
       python3 benchmarks/gpu_peers.py [--compiled FOLDER] [--rows ...] [--budget SECONDS] [--peers eager,compile] [--rounds N] [--gpus N]
       python3 benchmarks/gpu_peers.py --join OLD.json NEW.json [--note TEXT]
A row's first max-autotune takes up to two hundred seconds, mostly CPU time: `--warm` does all rows at once, in processes that alternate on
the GPU, and writes each row's cache as $OUT/<network>_<batch>.txz. The second command reads them from FOLDER; without it, rows are compiled
one after the other. A process has exclusive use of its GPU while it measures; the next one imports meanwhile. Results, after each row:
$OUT/peers.json, and whet's layers with their share of the roofline in $OUT/layers.txt; both are printed too.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, "src")

ROWS = (
    "yolov5s:1", "resnet50:1", "mobilenet_v2:1", "resnet50:8", "resnet50:128", "mobilenet_v2:128", "yolov5s:8",
    "resnet34:1", "resnet18:1", "resnet34:128", "resnet18:128",
)  # fmt: skip
#: seconds of torch.compile with an empty cache, measured on an H200 machine with 16 cores, and of the rest of a row
COMPILE = {"yolov5s": 200, "resnet50": 130, "mobilenet_v2": 132, "resnet34": 60, "resnet18": 45}
REST = 28
# : targets of the project, ms on one H200
REACH = {
    "resnet50:1": 0.18, "resnet50:8": 0.40, "resnet50:128": 2.9, "resnet34:1": 0.16, "resnet34:128": 1.9, "resnet18:1": 0.09,
    "resnet18:128": 1.15, "mobilenet_v2:1": 0.14, "mobilenet_v2:128": 1.2,
}  # fmt: skip
# : and speed relative to torch.compile
AHEAD = {"yolov5s:1": 2.0, "yolov5s:8": 1.5}
# : achievable rates of copies and FP16 products on such a GPU (measured 2026-11-20): bytes and operations per second
BYTES, FLOPS = 4.25e12, 738e12
WORK = Path(tempfile.gettempdir()) / "gpu_peers"


def folder() -> Path:
    """The output folder."""
    return Path(os.environ.get("OUT", "."))


def inductor_folder(row: str) -> Path:
    """Inductor's cache of one row."""
    return WORK / "inductor" / row.replace(":", "_")


def turn() -> Any:
    """The lock of this process's GPU."""
    from _inductor import Turn

    return Turn(os.environ.get("CUDA_VISIBLE_DEVICES", "0"))


class UntilVerification:
    """A build's progress: releases the GPU after the selection of kernels, when outputs are compared mostly on the CPU."""

    def __init__(self, mine: Any) -> None:
        self.mine, self.has = mine, True
        mine.__enter__()

    def stage(self, name: str, total: int) -> None:
        if self.has is not (name != "verification"):  # a failing kernel is banned, and the selection starts again
            (self.mine.__enter__ if name != "verification" else lambda: self.mine.__exit__(None))()
            self.has = name != "verification"

    def step(self, stage: str, done: int = 1) -> None:
        pass

    def note(self, text: str) -> None:
        print(f"  {text}"[:300], flush=True)


def build(name: str, batch: int, path: str) -> dict[str, Any]:
    """Writes a verified engine of the FP16 network, in a separate process, so that candidates' kernels do not occupy memory later."""
    from _half import half

    from whet import zoo
    from whet.builder import BuildConfig
    from whet.builder import build as build_engine
    from whet.engine import write_engine
    from whet.engine.schema import encode
    from whet.frontends.onnx import network_from_onnx

    net = network_from_onnx(half(zoo.build(name, batch=batch)))
    told = UntilVerification(turn())
    begun = time.perf_counter()
    plan = build_engine(net, BuildConfig(backend="cuda", precisions=("fp16",), timing_cache=""), progress=told)
    took = time.perf_counter() - begun
    write_engine(plan, path)
    return {"build_s": round(took, 1), "verification": encode(plan.report.verification)}


def graphed(run: Any) -> Any:
    """Captures a torch function as a CUDA graph; returns its replay."""
    import torch

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            run()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = run()
    return lambda: (graph.replay(), kept)[0]


def by_events(replay: Any, count: int) -> float:
    """Median ms of isolated replays."""
    import torch

    times = []
    for _ in range(count):
        a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        a.record()
        replay()
        b.record()
        b.synchronize()
        times.append(a.elapsed_time(b))
    return statistics.median(times)


def warm(name: str, batch: int, archive: str) -> dict[str, Any]:
    """Inductor's compilation of one row in parallel with others, its cache packed; and a first estimate of its time."""
    import torch
    from _inductor import compiled, exclusive, pack
    from _torch_models import image, model

    torch.set_grad_enabled(False)
    torch.backends.cudnn.benchmark = True
    mine, net, x = turn(), model(name), image(name, batch)
    exclusive(mine)
    begun = time.perf_counter()
    run = compiled(net)
    run(x)
    took = time.perf_counter() - begun
    size = pack(inductor_folder(f"{name}:{batch}"), Path(archive))  # first: the rest may run out of time
    with mine:
        replay = graphed(lambda: run(x))
        by_events(replay, 20)
        ms = by_events(replay, 40)
    return {"compile_s": round(took, 1), "waited_s": round(mine.waited, 1), "compile_ms": round(ms, 4), "packed_bytes": size}


def layer_rows(engine: Any, bound: Any) -> list[dict[str, Any]]:
    """whet's layers: microseconds per launch among equal launches, bytes, operations, and the share of the time of their lower bound."""
    from whet.inspector.facts import layer_facts

    rows = []
    for fact, seconds in zip(layer_facts(engine.plan), bound.run_timed(), strict=True):
        moved, computed = fact.bytes / BYTES, fact.flops / FLOPS
        rows.append({
            "layer": fact.name, "tactic": fact.choice.tactic, "config": dict(fact.choice.config), "us": 1e6 * seconds, "MB": fact.bytes / 1e6,
            "GFLOP": fact.flops / 1e9, "bound": "memory" if moved >= computed else "compute", "floor_us": 1e6 * max(moved, computed),
        })  # fmt: skip
    return rows


def layer_table(row: str, layers: list[dict[str, Any]]) -> str:
    """The rows as text, with their sum."""
    ceilings = f"bytes at {BYTES / 1e12:g} TB/s, products at {FLOPS / 1e12:g} TFLOP/s"
    lines = [f"{row}: us alone, least us ({ceilings}), share, MB, GFLOP, bound, tactic, layer, configuration"]
    total = {k: sum(r[k] for r in layers) for k in ("us", "floor_us", "MB", "GFLOP")}
    for r in (*layers, {**total, "bound": "", "tactic": "", "layer": "all", "config": ""}):
        share = 100 * r["floor_us"] / r["us"] if r["us"] else 0.0
        numbers = f"{r['us']:9.2f} {r['floor_us']:8.2f} {share:5.1f}% {r['MB']:8.2f} {r['GFLOP']:8.3f}"
        lines.append(f"{numbers} {r['bound']:7} {r['tactic']:26} {r['layer']} {r['config']}")
    return "\n".join(lines) + "\n\n"


def measure(name: str, batch: int, path: str, peers: str, rounds: int, first: str) -> dict[str, Any]:
    """One process of a row: loads the engine and the peers, the one named `first` before the others, and times all interleaved."""
    import torch
    import torch._inductor.compile_fx  # imported before the lock is held
    from _inductor import compiled
    from _torch_models import image, model

    from whet.backends import get_backend
    from whet.runtime import Runtime

    torch.set_grad_enabled(False)
    torch.backends.cudnn.benchmark = True
    turn().__enter__()  # held to the end: this process's GPU memory must be freed before the next one measures
    machine = get_backend("cuda")
    torch.zeros(1, device="cuda")
    torch.cuda.synchronize()
    row: dict[str, Any] = {"network": name, "batch": batch, "input": "f16 on the device"}
    sides: dict[str, Any] = {}
    shared: list[Any] = []  # the torch network and its image
    whets: list[Any] = []  # whet's engine, its context and its launcher

    def read_used_memory() -> int:
        torch.cuda.empty_cache()
        return machine.state()["used_memory"] or 0

    def torch_parts() -> list[Any]:
        if not shared:
            shared.extend((model(name), image(name, batch)))
        return shared

    def whet_side() -> Any:
        engine = Runtime(machine).load(path)
        context = engine.create_context()
        bound = context.launches()
        whets.extend((engine, context, bound))
        images = {n: context.device_array(n) for n in context.input_names}
        noise = torch.randn(next(iter(images.values())).shape, dtype=torch.half)
        bound.feed({n: noise.numpy() for n in images})
        images.clear()
        bound.run()
        return lambda count: 1e3 * statistics.median(bound.seconds(count))

    def eager_side() -> Any:
        net, x = torch_parts()
        replay = graphed(lambda: net(x))
        return lambda count: by_events(replay, count)

    def compile_side() -> Any:
        net, x = torch_parts()
        begun = time.perf_counter()
        run = compiled(net)
        replay = graphed(lambda: run(x))
        row["compile_s"] = round(time.perf_counter() - begun, 1)
        return lambda count: by_events(replay, count)

    make = {"whet": whet_side} | {side: made for side, made in (("eager", eager_side), ("compile", compile_side)) if side in peers}
    row["memory_mib"] = {}
    for side in sorted(make, key=lambda s: s != first):
        before = read_used_memory()
        try:
            sides[side] = make[side]()
        except RuntimeError as error:  # Dynamo's and Inductor's errors are RuntimeErrors: the rest of the row is kept without torch.compile
            row["error"] = f"{side}: {type(error).__name__}: {error}"[:500]
        row["memory_mib"][side] = round((read_used_memory() - before) / 2**20, 1)
    for run in sides.values():
        run(20)
    times: dict[str, list[float]] = {side: [] for side in sides}
    for i in range(rounds):
        for side in list(sides)[:: 1 if i % 2 else -1]:
            times[side].append(round(sides[side](20), 5))
    if first == "whet":
        row["layers"] = layer_rows(whets[0], whets[2])
    return row | {"first": first, "times_ms": times, "state": machine.state(), "device": machine.describe()["model"]}


def joined(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """A row from its processes: medians and intervals over all rounds, ratios within rounds, memory of the side that was loaded first."""
    from _record import median_interval

    row: dict[str, Any] = {k: v for k, v in runs[0].items() if k in ("network", "batch", "input")}
    times = {side: [ms for run in runs for ms in run["times_ms"].get(side, ())] for side in ("whet", "eager", "compile")}
    for side, values in times.items():
        if values:
            middle, low, high = median_interval(values)
            row |= {f"{side}_ms": round(middle, 4), f"{side}_interval_ms": [round(low, 4), round(high, 4)]}
            if side != "whet" and len(values) == len(times["whet"]):
                ratio, low, high = median_interval([b / a for a, b in zip(times["whet"], values, strict=True)])
                row |= {f"{side}_over_whet": round(ratio, 3), f"{side}_over_whet_interval": [round(low, 3), round(high, 3)]}
    memory = runs[0]["memory_mib"] | {run["first"]: run["memory_mib"][run["first"]] for run in runs}
    layers = [rows for run in runs if (rows := run.pop("layers", None))]
    return row | {f"{side}_mib": mib for side, mib in memory.items()} | {"layers": layers[0] if layers else [], "processes": runs}


def child(gpu: int, row: str, *words: str) -> dict[str, Any] | None:
    """Runs a part of this file in a separate process on one GPU; None (and its output) if it fails."""
    with tempfile.NamedTemporaryFile("r", suffix=".json") as answer:
        got = subprocess.run([sys.executable, __file__, "--child", answer.name, *words], check=False, env=environment(gpu, row))
        text = answer.read()
    return json.loads(text) if got.returncode == 0 and text else None


def environment(gpu: int, row: str) -> dict[str, str]:
    """A process of one row on one of the GPUs given to this process."""
    seen = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    return {
        **os.environ, "CUDA_VISIBLE_DEVICES": seen.split(",")[gpu] if seen else str(gpu), "TORCHINDUCTOR_CACHE_DIR": str(inductor_folder(row)),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "8"), "OPENBLAS_NUM_THREADS": os.environ.get("OPENBLAS_NUM_THREADS", "8"),
    }  # fmt: skip


def engine_of(row: str) -> str:
    """The path of a row's engine."""
    return str(WORK / f"{row.replace(':', '_')}.engine")


def measured(row: str, peers: str, rounds: int, gpu: int) -> dict[str, Any] | None:
    """A row's processes on one GPU, one after the other; its engine exists."""
    orders, words = ("whet", "compile" if "compile" in peers else "eager"), (*row.split(":"), engine_of(row), peers, str(rounds))
    runs = [run for first in orders if (run := child(gpu, row, "measure", *words, first)) is not None]
    Path(engine_of(row)).unlink()
    return joined(runs) | {"gpu": gpu} if runs else None


def bar(r: dict[str, Any]) -> str:
    """The project's target for a row, and its verdict: met, missed, or undecided if inside the 95 % interval; "" without a target or the peer."""
    row = f"{r['network']}:{r['batch']}"
    if row in REACH:
        low, high = r["whet_interval_ms"]
        return f"{REACH[row]:g} ms: {'met' if high <= REACH[row] else 'missed' if low > REACH[row] else 'undecided'}"
    if row in AHEAD and "compile_over_whet" in r:
        low, high = r["compile_over_whet_interval"]
        return f"{AHEAD[row]:g}x: {'met' if low >= AHEAD[row] else 'missed' if high < AHEAD[row] else 'undecided'}"
    return ""


def line(r: dict[str, Any]) -> str:
    """A row as readable text."""
    peer = "compile" if "compile_ms" in r else "eager"
    return (
        f"{r['network']:13} batch {r['batch']:4}  whet {r['whet_ms']:.4f} ms (built, verified in {r['build_s']} s)"
        f"  eager {r.get('eager_ms', float('nan')):.4f}"
        f"  compile {r.get('compile_ms', float('nan')):.4f}  {peer}/whet {r.get(f'{peer}_over_whet')} {r.get(f'{peer}_over_whet_interval')}"
        + (f"  {r['bar']}" if r["bar"] else "")
        + f"  MiB whet {r['whet_mib']} {peer} {r[f'{peer}_mib']}"
    )


def warm_all(rows: list[str], gpus: int, budget: float) -> None:
    """Fills the caches of all rows at once; rows not ready in time are packed as far as they are (their timings are valid)."""
    from _inductor import pack

    order = sorted(rows, key=lambda r: -COMPILE[r.partition(":")[0]])
    threads = str(max(2, 2 * (os.cpu_count() or 1) // len(rows)))
    begun, left = time.perf_counter(), {}
    for i, row in enumerate(order):
        archive = folder() / f"{row.replace(':', '_')}.txz"
        words = [sys.executable, __file__, "--child", str(WORK / f"{archive.stem}.json"), "warm", *row.split(":"), str(archive)]
        more = environment(i % gpus, row) | {"TORCHINDUCTOR_COMPILE_THREADS": threads, "OMP_NUM_THREADS": "2"}
        with open(WORK / f"{archive.stem}.log", "w") as log:
            left[row] = subprocess.Popen(words, env=more, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
    while left and time.perf_counter() - begun < budget:
        time.sleep(0.5)
        for row in [r for r, process in left.items() if process.poll() is not None]:
            answer = WORK / f"{row.replace(':', '_')}.json"
            code = left.pop(row).returncode
            said = answer.read_text() if code == 0 else f"code {code}: " + (WORK / f"{answer.stem}.log").read_text()[-1500:]
            print(f"{row:17} after {time.perf_counter() - begun:.0f} s: {said}", flush=True)
    for row, process in left.items():
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        archive = folder() / f"{row.replace(':', '_')}.txz"
        done = archive.exists() and inductor_folder(row).joinpath("fxgraph").exists()
        size = archive.stat().st_size if done else pack(inductor_folder(row), archive)
        print(f"{row:17} not ready: {size} bytes packed; {(WORK / f'{archive.stem}.log').read_text()[-300:]}", flush=True)


def permuted(gpus: int, rows: list[str], work: Any) -> None:
    """Calls work(row, gpu) for all rows, two at a time on each GPU: one prepares while the other measures."""
    waiting, guard = iter(rows), threading.Lock()

    def worker(gpu: int) -> None:
        while True:
            with guard:
                row = next(waiting, None)
            if row is None:
                return
            work(row, gpu)

    with ThreadPoolExecutor(2 * gpus) as pool:
        list(pool.map(worker, [*range(gpus)] * 2))


def measure_all(rows: list[str], o: argparse.Namespace) -> None:
    """Builds all engines, then measures all rows: nothing is verified on a GPU during timing."""
    from _inductor import SETTINGS
    from _record import provenance

    begun, guard = time.perf_counter(), threading.Lock()
    record: dict[str, Any] = {**provenance(["numpy", "cuda-bindings", "torch", "triton"]), "note": SETTINGS, "rows": [], "left_out": []}
    built: dict[str, dict[str, Any] | None] = {}
    tables: list[str] = []

    def make(row: str, gpu: int) -> None:
        built[row] = child(gpu, row, "build", *row.split(":"), engine_of(row))

    def time_it(row: str, gpu: int) -> None:
        compiling = COMPILE[row.partition(":")[0]] if "compile" in o.peers and not inductor_folder(row).joinpath("fxgraph").exists() else 0
        fits = time.perf_counter() - begun + 2 * compiling + REST <= o.budget
        found = measured(row, o.peers, o.rounds, gpu) if fits and built[row] is not None else None
        with guard:
            if found is None:
                record["left_out"].append(row)
            else:
                found = built[row] | found
                found["bar"] = bar(found)
                tables.append(layer_table(row, found.pop("layers")))
                (folder() / "layers.txt").write_text("".join(tables))
                record["device"] = found["processes"][0]["device"]
                record["rows"] = sorted([*record["rows"], found], key=lambda r: rows.index(f"{r['network']}:{r['batch']}"))
                print(f"{time.perf_counter() - begun:4.0f} s  {line(found)}", flush=True)
            (folder() / "peers.json").write_text(json.dumps(record, indent=1))

    permuted(o.gpus, sorted(rows, key=lambda r: -COMPILE[r.partition(":")[0]] - 60 * (r[-2:] != ":1")), make)  # the longest first
    print(f"{time.perf_counter() - begun:4.0f} s  built: " + ", ".join(f"{r} {b['build_s']} s" for r, b in built.items() if b), flush=True)
    permuted(o.gpus, rows, time_it)
    print("\n" + "".join(tables), end="", flush=True)
    if record["left_out"]:
        print("left out:", ", ".join(record["left_out"]), flush=True)
    print(f"{time.perf_counter() - begun:.0f} s", flush=True)


def join(old: Path, new: Path, note: str) -> None:
    """Merges two runs into one result file, `old`: rows of the newer run replace those of the older; each run keeps its date, commit and command."""
    earlier, later = json.loads(old.read_text()), json.loads(new.read_text())
    newer = {(r["network"], r["batch"]) for r in later["rows"]}
    runs = earlier if isinstance(earlier, list) else [earlier]
    kept = [{**run, "rows": [r for r in run["rows"] if (r["network"], r["batch"]) not in newer]} for run in runs]
    old.write_text(json.dumps([*kept, {**later, **({"note": note} if note else {})}], indent=1))


def main() -> None:
    """Fills the caches, measures, or merges two runs."""
    ask = argparse.ArgumentParser()
    ask.add_argument("--warm", action="store_true", help="only fill and pack Inductor's caches")
    ask.add_argument("--compiled", type=Path, help="folder with caches that --warm packed")
    ask.add_argument("--rows", default=",".join(ROWS))
    ask.add_argument("--peers", default="eager,compile")
    ask.add_argument("--budget", type=float, default=1e9)
    ask.add_argument("--rounds", type=int, default=11)
    ask.add_argument("--gpus", type=int, default=1, help="GPUs to deal the rows to")
    ask.add_argument("--join", type=Path, nargs=2, metavar=("OLD", "NEW"), help="only put the rows of a newer result file into an older one")
    ask.add_argument("--note", default="", help="what --join says of the newer run")
    o = ask.parse_args()
    if o.join:
        join(*o.join, o.note)
        return
    from _inductor import unpack

    rows = o.rows.split(",")
    WORK.mkdir(parents=True, exist_ok=True)
    for row in rows:
        packed = o.compiled / f"{row.replace(':', '_')}.txz" if o.compiled else None
        if packed is not None and packed.exists():
            unpack(packed, inductor_folder(row))
    if o.warm:
        warm_all(rows, o.gpus, o.budget)
    else:
        measure_all(rows, o)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        answer, what, network, size, where, *more = sys.argv[2:]
        if what == "measure":
            got = measure(network, int(size), where, more[0], int(more[1]), more[2])
        else:
            got = {"build": build, "warm": warm}[what](network, int(size), where)
        Path(answer).write_text(json.dumps(got))
    else:
        main()
