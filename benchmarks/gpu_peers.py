"""whet and its peers on one GPU, in turns within one process: FP16 networks with FP16 images on the device, both as CUDA graphs.

GPU time of isolated replays by events, in rounds that alternate between whet's engine (verified at its batch), torch eager in a CUDA graph and
torch.compile (max-autotune, captured in a CUDA graph too, so that no copy of the input counts). The row is the median over rounds with its
95 % interval. Memory is what the GPU says is used (NVML), each side after the CUDA context: weights, activations, kernels, workspaces.

Usage: python3 benchmarks/gpu_peers.py [--rows yolov5s:1,resnet50:1,...] [--budget SECONDS] [--peers eager,compile] [--rounds N] [--gpus N]
Each row runs in a process of its own, on a GPU of its own where there are several (torch.compile takes two minutes a row); results are
written after each row: $OUT/peers.json. `python3 benchmarks/gpu_peers.py --estimate` only prints what the rows take.
Fill the kernel cache first without a GPU: `gpu_engines.py compile`.
"""

from __future__ import annotations

import argparse
import json
import os
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
#: seconds of torch.compile with an empty cache, measured on an H200 machine with 16 cores; the rest of a row takes about REST
COMPILE = {"yolov5s": 200, "resnet50": 130, "mobilenet_v2": 132, "resnet34": 60, "resnet18": 45}
REST = 25
ORDINAL = "WHET_BENCHMARK_GPU"  # NVML counts the machine's GPUs, CUDA those that a process may see
#: ms on one H200 that the project set itself, and torch.compile's of the day before the first kernel
REACH = {
    "resnet50:1": 0.18, "resnet50:8": 0.40, "resnet50:128": 2.9, "resnet34:1": 0.16, "resnet34:128": 1.9, "resnet18:1": 0.09,
    "resnet18:128": 1.15, "mobilenet_v2:1": 0.14, "mobilenet_v2:128": 1.2,
}  # fmt: skip


def folder() -> Path:
    """Where results go."""
    return Path(os.environ.get("OUT", "."))


def estimate(row: str, peers: str) -> int:
    """Seconds that a row takes, roughly."""
    return REST + (COMPILE[row.partition(":")[0]] if "compile" in peers else 0)


def used() -> int:
    """Bytes in use on this process's GPU, of all processes."""
    from whet.backends.cuda import nvml

    return nvml.state(int(os.environ.get(ORDINAL, "0"))).used_memory or 0


def build(name: str, batch: int, path: str) -> dict[str, Any]:
    """Writes a verified engine of the FP16 network; in a process of its own, so that candidates' kernels are not in the way later."""
    from _half import half

    from whet import zoo
    from whet.builder import BuildConfig
    from whet.builder import build as build_engine
    from whet.engine import write_engine
    from whet.frontends.onnx import network_from_onnx

    net = network_from_onnx(half(zoo.build(name, batch=batch)))
    begun = time.perf_counter()
    plan = build_engine(net, BuildConfig(backend="cuda", precisions=("fp16",), timing_cache=""))
    took = time.perf_counter() - begun
    write_engine(plan, path)
    return {"build_s": round(took, 1), "verification": plan.report["verification"]}


def graphed(run: Any) -> Any:
    """A torch function as a CUDA graph; returns its replay."""
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


def measure(name: str, batch: int, path: str, peers: str, rounds: int) -> dict[str, Any]:
    """One row: loads the engine, makes the peers, times all in turns."""
    import torch
    from _record import median_interval

    from whet.backends import get_backend
    from whet.runtime import Runtime

    torch.set_grad_enabled(False)
    machine = get_backend("cuda")
    torch.zeros(1, device="cuda")
    torch.cuda.synchronize()
    start = used()
    context = Runtime(machine).load(path).create_context()
    bound = context.launches()
    images = {n: context.device_array(n) for n in context.input_names}
    noise = torch.randn(next(iter(images.values())).shape, dtype=torch.half)
    bound.feed({n: noise.numpy() for n in images})
    images.clear()
    bound.run()
    sides = {"whet": lambda count: 1e3 * statistics.median(bound.seconds(count))}
    memory = {"whet": used() - start}
    row: dict[str, Any] = {"network": name, "batch": batch, "input": "f16 on the device"}
    from _torch_models import image, model

    torch.backends.cudnn.benchmark = True
    before = used()
    net, x = model(name), image(name, batch)
    eager = graphed(lambda: net(x))
    torch.cuda.empty_cache()
    memory["eager"] = used() - before
    sides["eager"] = lambda count: by_events(eager, count)
    if "compile" in peers:
        import torch._inductor.config as inductor

        inductor.conv_1x1_as_mm = True
        inductor.max_autotune_conv_backends = "ATEN"  # cuDNN wins its convolutions against Inductor's own
        before, begun = used(), time.perf_counter()
        compiled_model = torch.compile(net, mode="max-autotune-no-cudagraphs")
        try:
            compiled = graphed(lambda: compiled_model(x))
        except RuntimeError as error:  # Dynamo's and Inductor's are RuntimeErrors: the rest of the row stands without it
            row["compile_error"] = f"{type(error).__name__}: {error}"[:500]
        else:
            row["compile_s"] = round(time.perf_counter() - begun, 1)
            torch.cuda.empty_cache()
            memory["compile"] = used() - before + sum(p.nbytes for p in (*net.parameters(), *net.buffers()))  # it shares eager's weights
            sides["compile"] = lambda count: by_events(compiled, count)
    for run in sides.values():
        run(20)
    times: dict[str, list[float]] = {side: [] for side in sides}
    for i in range(rounds):
        for side in list(sides)[:: 1 if i % 2 else -1]:
            times[side].append(sides[side](20))
    for side, values in times.items():
        middle, low, high = median_interval(values)
        row |= {f"{side}_ms": round(middle, 4), f"{side}_interval_ms": [round(low, 4), round(high, 4)]}
    row["memory_mib"] = {side: round(n / 2**20, 1) for side, n in memory.items()}
    row["state"] = machine.state()
    return row


def child(gpu: int, *words: str) -> dict[str, Any] | None:
    """Runs a part of this file in a process of its own on one GPU; None (and its words) when it fails."""
    seen = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    ordinal = seen.split(",")[gpu] if seen else str(gpu)  # of the machine's GPUs
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ordinal, ORDINAL: ordinal}
    with tempfile.NamedTemporaryFile("r", suffix=".json") as answer:
        got = subprocess.run([sys.executable, __file__, "--child", answer.name, *words], check=False, env=environment)
        text = answer.read()
    return json.loads(text) if got.returncode == 0 and text else None


def one_row(row: str, peers: str, rounds: int, gpu: int) -> dict[str, Any] | None:
    """Builds and measures a row on one GPU."""
    name, _, batch = row.partition(":")
    path = f"{tempfile.gettempdir()}/{name}_{batch}.engine"
    built = child(gpu, "build", name, batch, path)
    if built is None:
        return None
    measured = child(gpu, "measure", name, batch, path, peers, str(rounds))
    return None if measured is None else built | measured | {"gpu": gpu}


def line(r: dict[str, Any]) -> str:
    """A row for people."""
    best = min(r[f"{side}_ms"] for side in ("eager", "compile") if f"{side}_ms" in r)
    reach = REACH.get(f"{r['network']}:{r['batch']}")
    least = min(v for k, v in r["memory_mib"].items() if k != "whet")
    return (
        f"{r['network']:13} batch {r['batch']:4}  whet {r['whet_ms']:.4f} ms (built, verified in {r['build_s']} s)  eager {r['eager_ms']:.4f}"
        f"  compile {r.get('compile_ms', float('nan')):.4f}  lead {best / r['whet_ms']:.2f}x"
        + (f"  reach {reach}: {'yes' if r['whet_ms'] <= reach else 'no'}" if reach else "")
        + f"  MiB whet {r['memory_mib']['whet']} peer {least}"
    )


def main() -> None:
    """Rows one after the other on each GPU, as many as the budget holds."""
    ask = argparse.ArgumentParser()
    ask.add_argument("--rows", default=",".join(ROWS))
    ask.add_argument("--peers", default="eager,compile")
    ask.add_argument("--budget", type=float, default=1e9)
    ask.add_argument("--rounds", type=int, default=11)
    ask.add_argument("--gpus", type=int, default=1, help="GPUs to deal the rows to")
    ask.add_argument("--estimate", action="store_true")
    o = ask.parse_args()
    rows = o.rows.split(",")
    total = sum(estimate(r, o.peers) for r in rows)
    print(f"{len(rows)} rows, about {total / o.gpus:.0f} s with an empty compile cache", flush=True)
    if o.estimate:
        return
    from _record import provenance

    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", f"{tempfile.gettempdir()}/inductor")
    begun = time.perf_counter()
    made: dict[str, Any] = {**provenance(["numpy", "cuda-bindings"]), "rows": [], "left_out": []}
    waiting, guard = iter(rows), threading.Lock()

    def work(gpu: int) -> None:
        while True:
            with guard:
                row = next(waiting, None)
            if row is None:
                return
            fits = time.perf_counter() - begun + estimate(row, o.peers) <= o.budget
            found = one_row(row, o.peers, o.rounds, gpu) if fits else None
            with guard:
                if found is None:
                    made["left_out"].append(row)
                else:
                    made["rows"].append(found)
                    print(line(found), flush=True)
                (folder() / "peers.json").write_text(json.dumps(made, indent=1))

    with ThreadPoolExecutor(o.gpus) as pool:
        list(pool.map(work, range(o.gpus)))
    if made["left_out"]:
        print("left out:", ", ".join(made["left_out"]), flush=True)
    print(f"{time.perf_counter() - begun:.0f} s", flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        answer, what, network, size, where, *more = sys.argv[2:]
        got = build(network, int(size), where) if what == "build" else measure(network, int(size), where, more[0], int(more[1]))
        Path(answer).write_text(json.dumps(got))
    else:
        main()
