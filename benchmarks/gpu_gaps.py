"""Layers that used to have only slow kernels: grouped convolutions, FP32 products, attention. Own tactics against each other and torch, in one run.

A layer's time: a CUDA graph of equal launches on one set of operands, divided by their number (above 60 MB a layer evicts the L2 cache itself).
Usage: python3 benchmarks/gpu_gaps.py groups|tf32|attention[:SECONDS] ...      results in $OUT/gaps.json

Each set ends after its seconds (120), with the layers measured so far.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from _record import provenance

sys.path.insert(0, "src")
from whet.backends import get_backend
from whet.backends.cuda.launch import Graph
from whet.backends.cuda.stream import Event, Stream
from whet.builder.candidates.tactic_sources import list_enabled_tactics
from whet.composites.attention import make_attention_sample
from whet.network import Layer, Network, compute_stored_shape
from whet.network.types import F16, F32, parse_type
from whet.ops import sample_layer
from whet.tactics import Args

REPEATS = 20


def layer_of(op: str, x: tuple[int, ...], *constants: tuple[int, ...], **attrs: Any) -> Layer:
    """A layer with one run-time input of shape `x` and random constants."""
    net, rng = Network(op.lower()), np.random.default_rng(0)
    weights = [net.constant((rng.standard_normal(shape) / 16).astype(np.float32), f"c{i}") for i, shape in enumerate(constants)]
    layer = net.add_layer(op, [net.add_input("x", parse_type(f"f32{list(x)}".replace(" ", ""))), *weights], attrs)
    net.mark_output(layer.outputs[0])
    return layer


def conv(n: int, c: int, k: int, side: int, groups: int = 1, taps: int = 3, stride: int = 1) -> Layer:
    """A square convolution with the input's spatial size (divided by the stride)."""
    pads, strides = (taps // 2,) * 4, (stride,) * 2
    return layer_of("Conv", (n, c, side, side), (k, c // groups, taps, taps), (k,), group=groups, pads=pads, strides=strides)


def groups() -> dict[str, Layer]:
    """The 3x3 convolutions of ResNeXt-50 32x4d, and larger groups as in RegNet."""
    layers = {}
    for n in (1, 128):
        for width, side in ((128, 56), (256, 28), (512, 14), (1024, 7)):
            layers[f"resnext {n}x{side}x{width} 32 groups"] = conv(n, width, width, side, 32)
        layers[f"resnext {n}x56x256 32 groups /2"] = conv(n, 256, 256, 56, 32, stride=2)
        for width, side, each in ((192, 56, 24), (432, 28, 24), (512, 28, 64), (896, 14, 112)):
            layers[f"regnet {n}x{side}x{width} of {each}"] = conv(n, width, width, side, width // each)
    return layers


def tf32() -> dict[str, Layer]:
    """Convolutions of ResNet-18 and -50, and products of BERT, in FP32."""
    layers = {}
    for n in (1, 128):
        for c, side in ((64, 56), (128, 28), (256, 14), (512, 7)):
            layers[f"resnet {n}x{side}x{c} 3x3"] = conv(n, c, c, side)
        layers[f"resnet {n}x56x64 to 256 1x1"] = conv(n, 64, 256, 56, taps=1)
        layers[f"resnet {n}x7x2048 to 512 1x1"] = conv(n, 2048, 512, 7, taps=1)
        layers[f"bert {n * 128}x768x3072"] = layer_of("MatMul", (n, 128, 768), (768, 3072))
        layers[f"resnet fc {n}"] = layer_of("Gemm", (n, 2048), (1000, 2048), (1000,), transB=1)
    return layers


def attention() -> dict[str, Layer]:
    """Heads of BERT-base, ViT-B/16, Swin-T's first stage and longer sequences, as produced by projections."""
    sizes = {"bert 1": (1, 12, 128, 64), "bert 8": (8, 12, 128, 64), "vit 1": (1, 12, 197, 64), "vit 32": (32, 12, 197, 64)}
    sizes |= {"swin 1": (64, 3, 49, 32), "swin 32": (2048, 3, 49, 32), "long 1": (1, 16, 2048, 128), "long 4": (4, 16, 2048, 64)}
    return {k: sample_layer("Fused", make_attention_sample(b, h, n, n, d, layout="rows"))[1] for k, (b, h, n, d) in sizes.items()}


def timed(graph: Graph, stream: Stream, count: int, repeats: int = 7) -> float:
    """Median microseconds of one of the graph's `count` launches, from isolated replays."""
    start, end, times = Event(), Event(), []
    for _ in range(repeats + 1):
        stream.synchronize()
        start.record(stream)
        graph.run(stream)
        end.record(stream)
        end.synchronize()
        times.append(end.since(start) * 1000 / count)
    return statistics.median(times[1:])


def time_tactics(machine: Any, layer: Layer, kinds: tuple, until: float) -> dict[str, tuple[float, str]]:
    """tactic -> (microseconds, config) of its best configuration in one of the storage types."""
    best: dict[str, tuple[float, str]] = {}
    stream, rng = Stream(), np.random.default_rng(0)
    for t in list_enabled_tactics("cuda", ("-CUDNN",)):
        if t.name == "cuda/host_reference" or t.why_not(layer):
            continue
        for signature in t.signatures(layer, machine):
            if signature.outputs[0].dtype not in kinds or t.refuses(layer, signature, machine):
                continue
            ins = []
            for tensor, o in zip(layer.inputs, signature.inputs, strict=True):
                if o is None:
                    ins.append(None)
                    continue
                shape = compute_stored_shape(o.format, tensor.shape)
                block = rng.standard_normal(min(int(np.prod(shape)), 1 << 22)).astype(o.dtype.numpy)
                ins.append(machine.allocate(int(np.prod(shape)) * o.dtype.numpy.itemsize))
                for at in range(0, ins[-1].nbytes, block.nbytes):
                    machine.write(ins[-1], at, block.view(np.uint8)[: ins[-1].nbytes - at])
            weights: dict[str, Any] = {}
            for config in t.configs(layer, signature, machine):
                if time.time() > until:
                    break
                kernel = t.plan(layer, signature, config, machine)
                outs = [machine.allocate(n) for n in kernel.outputs]
                packed = []
                for p in kernel.packed:
                    if p.key not in weights:
                        weights[p.key] = machine.allocate(p.nbytes)
                        machine.write(weights[p.key], 0, p.make())
                    packed.append(weights[p.key].address)
                scratch = machine.allocate(kernel.scratch + 1)
                args = Args(tuple(0 if b is None else b.address for b in ins), tuple(b.address for b in outs), tuple(packed), scratch.address)
                launches = kernel.launches(args)
                count = max(1, REPEATS // len(launches))
                graph = Graph(list(launches) * count, stream)
                us = timed(graph, stream, count)
                graph.close()
                key = t.name.removeprefix("cuda/") + "".join(f" {v}" for n, v in config if n == "math")
                if key not in best or us < best[key][0]:
                    best[key] = (us, kernel.implementation)
    return best


def torch_us(run: Callable[[], Any]) -> float:
    """Median microseconds of a torch function in a CUDA graph."""
    import torch

    for _ in range(3):
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(REPEATS):
            run()
    times = []
    for _ in range(8):
        a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        a.record()
        graph.replay()
        b.record()
        b.synchronize()
        times.append(a.elapsed_time(b) * 1000 / REPEATS)
    return statistics.median(times[1:])


def peer(layer: Layer, half: bool) -> float:
    """The same layer by torch (cuDNN, cuBLAS) in its benchmark mode; channels last."""
    import torch

    torch.backends.cudnn.benchmark = True
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = True
    kind, a = torch.float16 if half else torch.float32, layer.attrs
    if layer.op == "Fused":
        q, k, v = (torch.randn(t.shape, device="cuda", dtype=kind).transpose(1, 2) for t in layer.inputs[:3])
        return torch_us(lambda: torch.nn.functional.scaled_dot_product_attention(q, k, v))
    x = torch.randn(layer.inputs[0].shape, device="cuda", dtype=kind)
    w, *b = (torch.from_numpy(np.array(t.array())).to("cuda", kind) for t in layer.inputs[1:])
    if layer.op == "Conv":
        x, w = x.contiguous(memory_format=torch.channels_last), w.contiguous(memory_format=torch.channels_last)
        return torch_us(lambda: torch.conv2d(x, w, b[0], stride=a["strides"], padding=a["pads"][:2], groups=a["group"]))
    if layer.op == "Gemm":
        return torch_us(lambda: torch.nn.functional.linear(x, w, b[0]))
    return torch_us(lambda: x @ w)


def floor_us(layer: Layer, size: int, rate: float) -> float:
    """max(bytes at 4.25 TB/s, operations at `rate` TFLOP/s)."""
    x, w, y = layer.inputs[0].shape, layer.inputs[1].shape, layer.outputs[0].shape
    if layer.op == "Fused":
        return float(max(4 * np.prod(x) * size / 4.25e6, 4 * np.prod(x) * x[1] / rate / 1e6))
    operations = 2 * np.prod(y) * (np.prod(w[1:]) if layer.op == "Conv" else x[-1])
    return float(max((np.prod(x) + np.prod(w) + np.prod(y)) * size / 4.25e6, operations / rate / 1e6))


def rows_of(machine: Any, spec: str, seconds: float) -> Iterator[dict[str, Any]]:
    """One row per layer of a set: the fastest of whet's tactics with its configuration, the best of each other tactic, torch, the floor."""
    until, half = time.time() + seconds, spec != "tf32"
    for name, layer in {"groups": groups, "tf32": tf32, "attention": attention}[spec]().items():
        if time.time() > until:
            print(spec, "is out of time before", name)
            return
        best = time_tactics(machine, layer, (F16,) if half else (F32,), until)
        first, *others = sorted(best, key=lambda k: best[k][0])
        us, torch = best[first][0], peer(layer, half)
        yield {
            "set": spec, "layer": name, "whet_us": round(us, 2), "torch_us": round(torch, 2), "torch_over_whet": round(torch / us, 2),
            "floor_us": round(floor_us(layer, 2 if half else 4, 738 if half else 369), 2), "tactic": first, "kernel": best[first][1],
            "others_us": {k: round(best[k][0], 2) for k in others},
        }  # fmt: skip


def main() -> None:
    machine, rows = get_backend("cuda"), []
    record = provenance(("numpy", "cuda-bindings", "torch")) | {"device": machine.describe()["model"]}
    for word in sys.argv[1:]:
        what, _, seconds = word.partition(":")
        for row in rows_of(machine, what, float(seconds or 120)):
            rows.append(row)
            print(" | ".join(f"{k} {v}" for k, v in row.items()), flush=True)
            with open(os.environ.get("OUT", ".") + "/gaps.json", "w") as out:
                json.dump({**record, "state": machine.state(), "rows": rows}, out, indent=1)


if __name__ == "__main__":
    main()
