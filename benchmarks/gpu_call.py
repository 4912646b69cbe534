"""The time of a call of whet.compile's module on one GPU, against the engine's own time and against a CUDA graph replayed by torch.

    python benchmarks/gpu_call.py [--networks mlp,resnet18] [--calls N] [--mode fp16|fp32]         results in $OUT/call.json

Per network, medians over the calls, in us:
    engine_us      GPU time of the engine's graph, replays isolated
    host_us        time until a call has returned, with the GPU idle before it: what the host does
    call_us        the same until the stream is empty: what a caller sees
    replay_us      a torch CUDA graph of the same module with its outputs in place, until the stream is empty; of which replay_gpu_us on the GPU
    queued_us      calls one after another without waiting, divided by their number
    overhead_us    call_us without engine_us; replay_overhead_us is the same of the torch graph: the part that any launch of a graph has
Calls of all kinds alternate in rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any

sys.path[:0] = [str(Path(__file__).parents[1] / "src"), str(Path(__file__).parent)]
ROUNDS = 7


def network(name: str) -> tuple[Any, Any]:
    """(module, input) in FP32 on the CPU: three small linear layers, or a network of torchvision."""
    import torch

    torch.manual_seed(0)
    if name == "mlp":
        parts = [torch.nn.Linear(256, 256), torch.nn.ReLU(), torch.nn.Linear(256, 256), torch.nn.ReLU(), torch.nn.Linear(256, 64)]
        return torch.nn.Sequential(*parts).eval(), torch.randn(1, 256)
    import torchvision

    return getattr(torchvision.models, name)(weights=None).eval(), torch.randn(1, 3, 224, 224)


def measure(name: str, calls: int, mode: str) -> dict[str, Any]:
    """The row of a network."""
    import torch
    from gpu_peers import by_events, graphed

    import whet
    from whet.backends import get_backend
    from whet.runtime import bind

    module, x = network(name)
    kind = torch.half if mode == "fp16" else torch.float32
    module, x = module.to("cuda", kind), x.to("cuda", kind)
    begun = perf_counter()
    fast = whet.compile(module, (x,), fp16=mode == "fp16", timing_cache="")
    row: dict[str, Any] = {"network": name, "mode": mode, "build_s": round(perf_counter() - begun, 1), "calls": calls}
    gpu = get_backend("cuda")
    row["device"] = gpu.describe()["model"]
    bound = bind(fast.plan, gpu)
    bound.run()
    with torch.no_grad():
        want = module(x)
        row["error"] = float(f"{((fast(x) - want).abs().max() / want.abs().max()).item():.2g}")
        replay = graphed(lambda: module(x))
        times: dict[str, list[float]] = {k: [] for k in ("engine_us", "host_us", "call_us", "replay_us", "replay_gpu_us", "queued_us")}
        for _ in range(ROUNDS):
            times["engine_us"].append(statistics.median(bound.seconds(30)) * 1e6)
            host, whole = alone(lambda: fast(x), calls)
            times["host_us"].append(host)
            times["call_us"].append(whole)
            times["replay_us"].append(alone(replay, calls)[1])
            times["replay_gpu_us"].append(by_events(replay, 30) * 1e3)
            start = perf_counter()
            for _ in range(calls):
                fast(x)
            torch.cuda.synchronize()
            times["queued_us"].append((perf_counter() - start) / calls * 1e6)
    row |= {k: round(statistics.median(v), 2) for k, v in times.items()}
    row["overhead_us"] = round(row["call_us"] - row["engine_us"], 2)
    row["replay_overhead_us"] = round(row["replay_us"] - row["replay_gpu_us"], 2)
    return row | {"fallbacks": fast.fallbacks}


def alone(run: Callable[[], Any], calls: int) -> tuple[float, float]:
    """Medians in us, each call with the GPU idle before: until the call returns, and until the stream is empty."""
    import torch

    host, whole = [], []
    for _ in range(calls):
        torch.cuda.synchronize()
        start = perf_counter()
        run()
        returned = perf_counter()
        torch.cuda.synchronize()
        host.append(returned - start)
        whole.append(perf_counter() - start)
    return statistics.median(host) * 1e6, statistics.median(whole) * 1e6


def main() -> None:
    from _record import provenance

    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--networks", default="mlp,resnet18")
    p.add_argument("--calls", type=int, default=200, help="calls per round")
    p.add_argument("--mode", choices=("fp16", "fp32"), default="fp16")
    args = p.parse_args()
    rows: list[dict[str, Any]] = []
    for name in args.networks.split(","):
        try:
            rows.append(measure(name, args.calls, args.mode))
        except Exception as e:  # noqa: BLE001 - any class: the row states what failed
            rows.append({"network": name, "mode": args.mode, "failed": f"{type(e).__name__}: {e}"[:500]})
        print(json.dumps(rows[-1]), flush=True)
        record = {**provenance(("numpy", "torch", "torchvision", "cuda-bindings")), "rows": rows}
        (Path(os.environ.get("OUT", ".")) / "call.json").write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
