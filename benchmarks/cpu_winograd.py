"""Winograd convolutions on the CPU: layers against the fastest other kernel of whet, and networks against ONNX Runtime (and OpenVINO if installed).

`python benchmarks/cpu_winograd.py [--layers 64x56x64,...] [--networks resnet18,vgg16] [--batches 1] [--threads 2] [--seconds 6] [--out FILE]`

A layer "CxSxK" has C input channels, images of S x S and K output channels, with a bias and ReLU. Kernels are timed interleaved on the same arrays;
a row has the median of each. Networks are built at level 3 and timed interleaved with the peers in one process.
"""

import argparse
import json
import tempfile
import time
from pathlib import Path
from statistics import median

import numpy as np
from _record import provenance
from cpu_peers import RUNNERS, block, feed

LAYERS = "64x56x64,128x28x128,256x14x256,512x7x512,512x28x512,64x112x64"
FORMATS = ("nhwc", "nChw8c", "nChw16c")


class Recorded:
    """A stream that keeps the calls."""

    def __init__(self) -> None:
        self.calls = []

    def record(self, call) -> None:
        self.calls.append(call)


def layer_of(channels: int, size: int, results: int, batch: int):
    from whet.network import Network, parse_type

    rng, net = np.random.default_rng(1), Network("layer", "lowered")
    x = net.add_input("x", parse_type(f"f32[{batch},{channels},{size},{size}]"))
    body = Network("body", "lowered")
    shapes = ((batch, channels, size, size), (results, channels, 3, 3), (results,))
    inner = [body.add_input(f"i{k}", parse_type(f"f32[{','.join(map(str, s))}]")) for k, s in enumerate(shapes)]
    body.mark_output(body.add("Relu", body.add("Conv", *inner, pads=(1, 1, 1, 1), group=1)))
    constants = [net.constant((rng.standard_normal(s) / 30).astype(np.float32), f"w{k}") for k, s in enumerate(shapes[1:])]
    net.mark_output(net.add("Fused", x, *constants, composite="Conv", regions={"body": body}))
    return net.layers[0]


def prepared(option, backend):
    """A function that runs a planned kernel once, and the memory that it uses."""
    from whet.runtime import aligned_empty
    from whet.tactics import Args

    rng, kernel, stream = np.random.default_rng(0), option.kernel, Recorded()

    def memory(count: int) -> np.ndarray:
        return aligned_empty((max(count, 64),), np.uint8)

    packed = []
    for p in kernel.packed:
        packed.append(memory(p.nbytes))
        packed[-1][: p.nbytes] = p.make()
    inputs = [memory(n) if n else None for n in kernel.inputs]
    for a in inputs:
        if a is not None:
            a.view(np.float32)[...] = rng.standard_normal(a.size // 4)
    outputs, scratch = [memory(n) for n in kernel.outputs], memory(kernel.scratch)
    addresses = [tuple(0 if a is None else a.ctypes.data for a in part) for part in (inputs, outputs, packed)]
    kernel.enqueue(Args(*addresses, scratch.ctypes.data), stream)

    def run() -> None:
        for call in stream.calls:
            call.run()

    run()
    return run, (packed, inputs, outputs, scratch, kernel)


def time_layer(text: str, batch: int, args: argparse.Namespace) -> dict:
    from whet.backends import get_backend
    from whet.builder.candidates.enumerate import list_candidates
    from whet.builder.precision.permissions import Permissions
    from whet.tactics import tactics_of

    backend = get_backend("cpu", threads=args.threads)
    backend.activate()
    channels, size, results = map(int, text.split("x"))
    layer = layer_of(channels, size, results, batch)
    found = list_candidates(layer, [t for t in tactics_of("cpu") if not t.fallback], backend, Permissions(frozenset())).options
    options = {}
    for o in found:
        if not o.signature.inplace and o.signature.needs(0).format == o.signature.outputs[0].format:
            options[f"{o.tactic.name} {o.signature.outputs[0].format} {o.kernel.implementation}"] = prepared(o, backend)
    times: dict[str, list[float]] = {n: [] for n in options}
    end = time.perf_counter() + args.seconds
    while time.perf_counter() < end:
        for n, (run, _) in options.items():
            run()
            start = time.perf_counter()
            run()
            times[n].append(1e6 * (time.perf_counter() - start))
    us = {n: round(median(t), 1) for n, t in times.items()}
    best = {name: min(((t, n) for n, t in us.items() if ("winograd" in n) == (name == "winograd")), default=None) for name in ("winograd", "other")}
    row = {"case": text, "batch": batch, "threads": args.threads, "us": dict(sorted(us.items(), key=lambda t: t[1]))}
    if all(best.values()):
        row["ratio"] = round(best["other"][0] / best["winograd"][0], 3)
    peak = 2 * 9 * channels * results * size**2 * batch
    print(f"{text} batch {batch}: ratio {row.get('ratio')}, {peak / best['winograd'][0] / 1e3:.0f} GFLOP/s of a direct convolution")
    for n, t in list(row["us"].items())[:6]:
        print(f"    {t:10.1f} us  {n}")
    return row


def time_network(name: str, batch: int, args: argparse.Namespace, folder: Path) -> dict:
    import whet.zoo
    from whet.builder import BuildConfig, build
    from whet.engine import write_engine
    from whet.frontends import network_from_onnx

    model = folder / f"{name}.onnx"
    whet.zoo.save(name, model, batch=batch)
    net = network_from_onnx(model)
    arrays = feed({t.name: tuple(int(d) for d in t.shape) for t in net.inputs})
    row: dict = {"case": name, "batch": batch, "threads": args.threads}
    engines = {"whet": (), "without_winograd": ("-WINOGRAD",)}
    runs = {}
    for engine, sources in engines.items():
        config = BuildConfig(threads=args.threads, timing_cache=str(folder / "t.sqlite"), optimization_level=args.level, tactic_sources=sources)
        plan = build(net, config)
        row[f"{engine}_build_seconds"] = round(plan.report.build_seconds, 1)
        row[f"{engine}_error"] = plan.report.verification.network_error
        write_engine(plan, folder / f"{engine}.engine")
        runs[engine] = RUNNERS["whet"](folder / f"{engine}.engine", args.threads)
    for peer in ("ort", "openvino"):
        try:
            runs[peer] = RUNNERS[peer](model, args.threads)
        except ImportError:
            print(f"{peer} is not installed")
    times: dict[str, list[float]] = {n: [] for n in runs}
    end = time.perf_counter() + args.seconds
    while time.perf_counter() < end:
        for n, run in runs.items():
            times[n].append(median(block(run, arrays)))
    row |= {f"{n}_ms": round(median(t), 3) for n, t in times.items()}
    row["ratio"] = round(min(row[f"{p}_ms"] for p in ("ort", "openvino") if f"{p}_ms" in row) / row["whet_ms"], 3)
    print(json.dumps(row), flush=True)
    return row


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--layers", default=LAYERS)
    p.add_argument("--networks", default="")
    p.add_argument("--batches", default="1")
    p.add_argument("--threads", type=int, default=2)
    p.add_argument("--seconds", type=float, default=6.0, help="of timing for each row")
    p.add_argument("--level", type=int, default=3)
    p.add_argument("--out", default=str(Path(__file__).parent / "results" / "cpu" / "winograd.json"))
    args = p.parse_args()
    from whet.backends import get_backend

    rows: list[dict] = []
    batches = [int(b) for b in args.batches.split(",")]
    with tempfile.TemporaryDirectory() as folder:
        for batch in batches:
            if args.networks:
                rows += [time_network(n, batch, args, Path(folder)) for n in args.networks.split(",")]
            else:
                rows += [time_layer(n, batch, args) for n in args.layers.split(",")]
            machine = {k: v for k, v in get_backend("cpu", threads=args.threads).describe().items() if k in ("model", "cpus", "caches", "loop")}
            result = {**provenance(("numpy", "onnxruntime", "openvino")), "machine": machine, "rows": rows}
            Path(args.out).write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
