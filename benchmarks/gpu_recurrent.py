"""Recurrent layers on one GPU: whet's kernels against torch.nn.LSTM, GRU and RNN (cuDNN) in FP16, each in a CUDA graph.

    python benchmarks/gpu_recurrent.py [--units 128,256,512] [--steps 33,128] [--batches 1,8] [--ops LSTM,GRU] [--all]

A layer is bidirectional and takes 512 inputs. `cluster_us` is the fastest configuration of cluster_recurrent (`config`; --all: `configs_us` has the
time of each), `recurrent_us` the kernel that reads the weights from the L2 cache at each step, `torch_us` torch's layer. Times are medians of graph
replays that start when the GPU is idle; `error` is the greatest difference from the reference in NumPy, relative to its greatest value.
Results: $OUT/recurrent.json. Needs torch for `torch_us`.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from pathlib import Path
from typing import Any

import numpy as np
from _record import provenance

sys.path.insert(0, "src")

from whet.backends import get_backend
from whet.network import Layer, Network, TensorType, static_shape
from whet.network.types import F16, F32
from whet.ops import run_layer
from whet.tactics import Args, Tactic, get_tactic, load_tactics

INPUTS, ROUNDS, REPLAYS = 512, 5, 20


def layer_of(op: str, units: int, steps: int, batch: int) -> tuple[Network, Layer, list[np.ndarray]]:
    """A bidirectional layer with random weights, its network, and the arrays of x, W, R and B."""
    gates = {"RNN": 1, "GRU": 3, "LSTM": 4}[op]
    rng, bound = np.random.default_rng(0), 1 / np.sqrt(units)

    def weights(*shape: int) -> np.ndarray:
        return rng.uniform(-bound, bound, shape).astype(np.float16).astype(np.float32)

    x = rng.standard_normal((steps, batch, INPUTS)).astype(np.float16).astype(np.float32)
    w, r, b = weights(2, gates * units, INPUTS), weights(2, gates * units, units), weights(2, 2 * gates * units)
    net = Network("recurrent")
    inputs = [net.add_input("x", TensorType(F32, x.shape)), *(net.constant(a, n) for n, a in (("w", w), ("r", r), ("b", b)))]
    attrs: dict[str, Any] = {"hidden_size": units, "direction": "bidirectional"}
    if op == "GRU":
        attrs["linear_before_reset"] = 1
    return net, net.add_layer(op, inputs, attrs), [x, w, r, b]


def time_config(gpu: Any, tactic: Tactic, layer: Layer, config: Any, x: np.ndarray) -> tuple[float, np.ndarray]:
    """Median us of a configuration in FP16, and its first result."""
    signature = next(s for s in tactic.signatures(layer, gpu) if s.outputs[0].dtype == F16)
    kernel = tactic.plan(layer, signature, config, gpu)

    def stored(values: np.ndarray) -> Any:
        buffer = gpu.allocate(max(values.nbytes, 1))
        gpu.write(buffer, 0, np.ascontiguousarray(values).reshape(-1).view(np.uint8))
        return buffer

    fed, packed = stored(x.astype(np.float16)), [stored(p.make()) for p in kernel.packed]
    outputs = [gpu.allocate(n) for n in kernel.outputs]
    scratch = gpu.allocate(max(kernel.scratch, 1))
    stream = gpu.stream()
    kernel.enqueue(
        Args((fed.address, *(0,) * (len(layer.inputs) - 1)), tuple(b.address for b in outputs), tuple(b.address for b in packed), scratch.address),
        stream,
    )
    executable = stream.finish()
    executable.run()
    got = gpu.read(outputs[0], 0, kernel.outputs[0]).view(np.float16).astype(np.float32)
    return statistics.median(gpu.seconds(executable, REPLAYS)) * 1e6, got


def torch_time(op: str, units: int, x: np.ndarray) -> float | None:
    """Median us of torch's layer in a CUDA graph; None without torch."""
    try:
        import torch
    except ImportError:
        return None
    from gpu_peers import by_events, graphed

    with torch.no_grad():
        net = getattr(torch.nn, op)(INPUTS, units, bidirectional=True).half().cuda().eval()
        net.flatten_parameters()
        fed = torch.from_numpy(x).half().cuda()
        replay = graphed(lambda: net(fed))
        return statistics.median(by_events(replay, REPLAYS) for _ in range(ROUNDS)) * 1e3


def main() -> None:
    """Measures and prints each row, and writes the file after it."""
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in (("units", "128,256,512"), ("steps", "33,128"), ("batches", "1,8"), ("ops", "LSTM")):
        p.add_argument(f"--{name}", default=default)
    p.add_argument("--all", action="store_true", help="the time of each configuration")
    args = p.parse_args()
    load_tactics("cuda")
    gpu, rows = get_backend("cuda"), []
    cluster, plain = get_tactic("cuda/cluster_recurrent"), get_tactic("cuda/recurrent")
    result = provenance(("numpy", "torch", "cuda-bindings")) | {"device": gpu.describe()["model"], "rows": rows}
    for op in args.ops.split(","):
        for units in map(int, args.units.split(",")):
            for steps in map(int, args.steps.split(",")):
                for batch in map(int, args.batches.split(",")):
                    _net, layer, arrays = layer_of(op, units, steps, batch)
                    want = run_layer(layer, arrays)[0]
                    signature = next(s for s in cluster.signatures(layer, gpu) if s.outputs[0].dtype == F16)
                    row: dict[str, Any] = {"op": op, "units": units, "steps": steps, "batch": batch}
                    times = {}
                    for config in cluster.configs(layer, signature, gpu):
                        times[config], got = time_config(gpu, cluster, layer, config, arrays[0])
                        row["error"] = max(
                            row.get("error", 0.0), float(np.abs(got.reshape(static_shape(layer.outputs[0].shape)) - want).max() / np.abs(want).max())
                        )
                    best = min(times, key=times.__getitem__)
                    row |= {"cluster_us": round(times[best], 1), "config": dict(best)}
                    if args.all:
                        row["configs_us"] = [[dict(c), round(us, 1)] for c, us in sorted(times.items(), key=lambda item: item[1])]
                    row["recurrent_us"] = round(time_config(gpu, plain, layer, (), arrays[0])[0], 1)
                    us = torch_time(op, units, arrays[0])
                    row["torch_us"] = None if us is None else round(us, 1)
                    rows.append(row)
                    print(json.dumps(row), flush=True)
                    Path(os.environ.get("OUT", "."), "recurrent.json").write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
