"""ResNet-50's convolutions one by one on a GPU: own kernels (all candidate configurations) against cuDNN through torch.

A layer's time: a CUDA graph of L equal launches on L sets of input, weights, residual and output, divided by L. "cold": the sets
together exceed the L2 cache several times; "warm": one set. Own launches overlap as in the network (programmatic dependent launch).

Usage: python3 benchmarks/gpu_conv_layers.py own|cudnn|compile [batches] [seconds]     results in $OUT
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from gpu_layers import Layer, resnet50

from whet.backends.cuda.compile import compile_cubin
from whet.backends.cuda.compile_only import CompileOnlyGpu
from whet.backends.cuda.driver import device
from whet.backends.cuda.launch import Graph
from whet.backends.cuda.memory import DeviceBuffer
from whet.backends.cuda.stream import Event, Stream
from whet.tactics.cuda.conv._conv import RELU, PostOps, View, pack_bias
from whet.tactics.cuda.conv._conv_config import ConvConfig
from whet.tactics.cuda.conv._conv_launch import ConvProblem, Features, conv_launch, conv_source
from whet.tactics.cuda.conv._conv_tiles import list_conv_configs

COLD_BYTES = 200e6


def candidates(layer: Layer, multiprocessors: int) -> list[ConvConfig]:
    return list_conv_configs(layer.shape, multiprocessors)


def timed(graph: Graph, stream: Stream, count: int, repeats: int) -> float:
    """Median microseconds of one of the graph's `count` launches, from isolated replays."""
    start, end = Event(), Event()
    times = []
    for _ in range(repeats + 1):
        stream.synchronize()
        start.record(stream)
        graph.run(stream)
        end.record(stream)
        end.synchronize()
        times.append(end.since(start) * 1000 / count)
    return statistics.median(times[1:])


def summary(batch: int, rows: list[dict]) -> str:
    cold, warm = (sum(r[key] * r["count"] for r in rows) for key in ("cold", "warm"))
    return f"batch {batch}: {sum(r['count'] for r in rows)} convolutions of {len(rows)} kinds, sum cold {cold:.1f} us, warm {warm:.1f} us"


class Sets:
    """L sets of operands of one layer in device memory, filled with random numbers."""

    def __init__(self, layer: Layer, noise: DeviceBuffer) -> None:
        s = layer.shape
        self.sizes = [s.n * s.h * s.w * s.c * 2, s.k * s.r * s.s * s.c * 2, s.m * s.k * 2, s.m * s.k * 2 if layer.residual else 0]
        self.bytes = sum(self.sizes)
        self.count = int(min(40, max(3, COLD_BYTES // self.bytes)))
        self.noise = noise

    def addresses(self, i: int) -> list[int]:
        at, found = self.noise.address + (self.bytes + 4096) * i // 1024 * 1024, []
        for size in self.sizes:
            found.append(at)
            at += (size + 1023) // 1024 * 1024
        return found


def own(batches: list[int], seconds: float) -> None:
    device(0)
    stream = Stream()
    rng = np.random.default_rng(0)
    chunk = (rng.standard_normal(1 << 24) / 16).astype(np.float16)
    noise = DeviceBuffer(4 << 30)
    for i in range(noise.nbytes // chunk.nbytes):
        noise.write(chunk, i * chunk.nbytes)
    bias = DeviceBuffer.of(pack_bias(rng.standard_normal(2048).astype(np.float32), 2048))
    begun = time.time()
    rows = []
    for batch in batches:
        for layer in resnet50(batch):
            sets, tried = Sets(layer, noise), []
            for config in candidates(layer, device().multiprocessors):
                if time.time() - begun > seconds:
                    break
                launches = []
                for i in range(sets.count):
                    x, w, y, r = sets.addresses(i)
                    view = View(r, layer.shape.k) if layer.residual else None
                    launches.append(
                        conv_launch(
                            config,
                            ConvProblem(
                                shape=layer.shape,
                                input=View(x, layer.shape.c),
                                weights=w,
                                bias=bias.address,
                                output=View(y, layer.shape.k),
                                residual=view,
                                post_ops=PostOps(RELU),
                            ),
                            multiprocessors=device().multiprocessors,
                        )
                    )
                graph = Graph(launches, stream)
                cold = timed(graph, stream, sets.count, 5)
                graph.close()
                graph = Graph(launches[:1] * 20, stream)
                warm = timed(graph, stream, 20, 5)
                graph.close()
                tried.append((cold, warm, str(config)))
            if not tried:
                continue
            tried.sort()
            best = tried[0]
            rows.append(
                {
                    "batch": batch,
                    "layer": layer.name,
                    "count": layer.count,
                    "cold": round(best[0], 2),
                    "warm": round(min(t[1] for t in tried), 2),
                    "config": best[2],
                    "tflops": round(layer.shape.flops / best[0] / 1e6, 1),
                    "TBps": round(sets.bytes / best[0] / 1e6, 2),
                    "all": [(round(a, 2), round(b, 2), c) for a, b, c in tried],
                }
            )
            print(
                batch,
                layer.name,
                layer.count,
                rows[-1]["cold"],
                rows[-1]["warm"],
                best[2],
                rows[-1]["tflops"],
                rows[-1]["TBps"],
                "|",
                *(f"{c}:{a:.2f}/{b:.2f}" for a, b, c in tried[1:3]),
                flush=True,
            )
        mine = [r for r in rows if r["batch"] == batch]
        print("own", summary(batch, mine), flush=True)
        with open(os.environ.get("OUT", ".") + f"/own_{batch}.json", "w") as out:
            json.dump(mine, out, indent=0)


def cudnn(batches: list[int], seconds: float) -> None:
    import torch

    torch.backends.cudnn.benchmark = True
    torch.set_grad_enabled(False)
    begun, rows = time.time(), []
    for batch in batches:
        for layer in resnet50(batch):
            if time.time() - begun > seconds:
                break
            s = layer.shape
            nbytes = 2 * (s.n * s.h * s.w * s.c + s.k * s.r * s.s * s.c + s.m * s.k * (2 if layer.residual else 1))
            count = int(min(40, max(3, COLD_BYTES // nbytes)))

            def make(*size):
                return (torch.randn(*size, device="cuda", dtype=torch.half) / 16).to(memory_format=torch.channels_last)

            sets = [(make(s.n, s.c, s.h, s.w), make(s.k, s.c, s.r, s.s), make(s.n, s.k, s.p, s.q) if layer.residual else None) for _ in range(count)]
            bias = torch.randn(s.k, device="cuda", dtype=torch.half)
            args = (bias, list(s.stride), list(s.pad[:2]), [1, 1], 1)

            def one(x, w, z, args=args):
                if z is None:
                    return torch.cudnn_convolution_relu(x, w, *args)
                return torch.cudnn_convolution_add_relu(x, w, z, 1.0, *args)

            def time_graph(work, n):
                side = torch.cuda.Stream()
                with torch.cuda.stream(side):
                    one(*work[0])
                torch.cuda.synchronize()
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    kept = [one(*w) for w in work]
                times = []
                for _ in range(6):
                    a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                    torch.cuda.synchronize()
                    a.record()
                    graph.replay()
                    b.record()
                    b.synchronize()
                    times.append(a.elapsed_time(b) * 1000 / n)
                del kept
                return statistics.median(times[1:])

            cold = time_graph(sets, count)
            warm = time_graph(sets[:1] * 20, 20)
            rows.append({"batch": batch, "layer": layer.name, "count": layer.count, "cold": round(cold, 2), "warm": round(warm, 2)})
            print(batch, layer.name, layer.count, f"{cold:.2f} {warm:.2f}", flush=True)
            del sets
            torch.cuda.empty_cache()
        mine = [r for r in rows if r["batch"] == batch]
        print("cudnn", summary(batch, mine), flush=True)
        with open(os.environ.get("OUT", ".") + f"/cudnn_{batch}.json", "w") as out:
            json.dump(mine, out, indent=0)


def compile_all(batches: list[int]) -> None:
    """Fills the kernel cache; needs no GPU."""
    hopper = CompileOnlyGpu("sm_90").capabilities.multiprocessors
    wanted = {(c, not layer.shape.plain and not c.halo) for batch in batches for layer in resnet50(batch) for c in candidates(layer, hopper)}
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        sizes = list(pool.map(lambda w: len(compile_cubin(conv_source(w[0], Features(w[1])))), sorted(wanted)))
    print(len(sizes), "kernels", sum(sizes) / 1e6, "MB")


if __name__ == "__main__":
    which = sys.argv[1]
    sizes = [int(b) for b in sys.argv[2].split(",")] if len(sys.argv) > 2 else [1, 8, 128]
    budget = float(sys.argv[3]) if len(sys.argv) > 3 else 1e9
    if which == "compile":
        compile_all(sizes)
    else:
        {"own": own, "cudnn": cudnn}[which](sizes, budget)
