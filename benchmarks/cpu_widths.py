"""Fast widths of the CPU's convolutions: GFLOP/s of 3x3 and 1x1 convolutions with SiLU over widths, in steps of 16.

    python benchmarks/cpu_widths.py [--size 40] [--widths 32,48,...] [--rounds 40] [--save benchmarks/results/cpu/widths.json]

Each width is an engine of three convolutions of that width, of which the middle one is timed; engines are interleaved, and the fastest run
counts: the kernel without disturbance. A cut to a width between two fast ones saves FLOPs and little time; the table shows widths at which
cuts should stop (docs/design/pruning.md). `whet latency-table` times the layers of one network as a build does, once each with the cache state of
the network; that does not resolve differences of a few percent between widths.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
from _record import command, provenance
from rich.progress import track

import whet
from whet.backends import get_backend
from whet.inspector.facts import layer_facts
from whet.network import F32, Network, TensorType

WIDTHS = (32, 48, 64, 80, 96, 112, 128, 144, 160, 176, 192, 208, 224, 240, 256, 288, 304, 320)
DEPTH = 3  # convolutions of an engine: the first reads and the last writes users' tensors, in other formats


def network(window: int, width: int, size: int) -> Network:
    """x[1, width, size, size] through DEPTH convolutions of `window` squared, each with SiLU."""
    net, rng = Network(f"conv{window}x{window}_{width}"), np.random.default_rng(0)
    x = net.add_input("x", TensorType(F32, (1, width, size, size)))
    for n in range(DEPTH):
        weights = rng.standard_normal((width, width, window, window)).astype(np.float32) / (window * width**0.5)
        y = net.add("Conv", x, net.constant(weights, f"w{n}"), pads=(window // 2,) * 4)
        x = net.add("Mul", y, net.add("Sigmoid", y))
    net.mark_output(x, "y")
    return net


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--size", type=int, default=40, help="height and width of the image")
    p.add_argument("--widths", default=",".join(map(str, WIDTHS)))
    p.add_argument("--rounds", type=int, default=40)
    p.add_argument("--save")
    args = p.parse_args()
    runtime, rows = whet.Runtime(backend="cpu"), []
    for window in (3, 1):
        engines = []
        for width in track([int(w) for w in args.widths.split(",")], description=f"{window}x{window}: building"):
            plan = whet.builder.build(network(window, width, args.size), whet.BuildConfig(backend="cpu"))
            engines.append((width, runtime.load(plan)))
        rows += measure(window, args.size, engines, args.rounds)
    for r in rows:
        print(f"{r['window']}x{r['window']} {r['width']:4} channels {r['ms']:8.4f} ms {r['gflops_per_s']:6.1f} GFLOP/s  {r['tactic']}")
    if args.save:
        machine = get_backend("cpu").describe()
        about = provenance(("numpy",)) | {"command": command("benchmarks/cpu_widths.py")}
        about["machine"] = {k: v for k, v in machine.items() if k in ("model", "cpus", "threads")}
        Path(args.save).write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n")


def measure(window: int, size: int, engines: list[tuple[int, Any]], rounds: int) -> list[dict[str, Any]]:
    """One row per width: the middle convolution, all engines interleaved."""
    contexts, found = [e.create_context() for _, e in engines], [float("inf")] * len(engines)
    middle = []
    for _, e in engines:
        computed = [n for n, f in enumerate(layer_facts(e.plan)) if f.flops]
        middle.append(computed[len(computed) // 2])
    feeds = [{"x": np.random.default_rng(0).standard_normal((1, w, size, size)).astype(np.float32)} for w, _ in engines]
    for n in track(range(rounds), description=f"{window}x{window}: timing"):
        for k in range(len(engines))[:: -1 if n % 2 else 1]:
            times = contexts[k].profile(feeds[k], 6)
            found[k] = min(found[k], *times[middle[k]].times_ms)
    rows = []
    for (width, e), k, ms in zip(engines, middle, found, strict=True):
        f = layer_facts(e.plan)[k]
        rows.append({
            "window": window, "size": size, "width": width, "ms": round(ms, 5), "gflops_per_s": round(f.flops / ms / 1e6, 1),
            "tactic": f"{f.choice.tactic} {f.choice.implementation}".strip(),
        })  # fmt: skip
    return rows


if __name__ == "__main__":
    main()
