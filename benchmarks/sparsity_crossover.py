"""Where does 2:4 start to win? Dense against sparse tactics of single layers over channels, precisions and batches; and layer by layer of networks.

    python benchmarks/sparsity_crossover.py --backend cuda [--output FILE] [--seconds 140]
    python benchmarks/sparsity_crossover.py --backend cuda --networks resnet34:128,resnet50:128 [--output FILE]
    python benchmarks/sparsity_crossover.py --merge PART... --output results/h200/sparsity_crossover.json

Layers: a 1x1 and a 3x3 convolution (14x14 pixels, as many output as input channels) and a linear layer (128 rows per sample), with synthetic
weights. Times are those of `whet sparsity` (builder's candidates and timer; weights out of the L2 cache on a GPU). A row is written as soon as
its channels are timed; rows that the file has are not measured again, so a run that ends at --seconds continues where it stopped.
`speedup` is the dense over the sparse time; `wins` is 1 if the difference exceeds the noise. In INT8, layers without INT8 kernels are FP16.
chart.py draws the rows of the result files.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "src"))

import numpy as np
from _record import alone, provenance

from whet.backends import get_backend
from whet.builder import BuildConfig
from whet.network import Network, parse_type
from whet.pruning import SparsityAdvice, advise_sparsity

RESULTS = Path(__file__).parent / "results"
CHANNELS, BATCHES, KINDS = (64, 128, 256, 512, 1024, 2048), (1, 8, 128), ("1x1", "3x3", "linear")
PIXELS, ROWS = 14, 128  # height and width of the convolutions, rows per sample of the linear layers
PRECISIONS = {"fp32": (), "fp16": ("fp16",), "bf16": ("bf16",), "int8": ("int8", "fp16"), "int8_fp32": ("int8",)}
Key = tuple[str, int, int]  # precision, batch, channels


def two_four_weights(shape: tuple[int, ...], axis: int) -> np.ndarray:
    """Random weights of which two of every four along `axis` are zero: a pair at random per group."""
    rng = np.random.default_rng(24)
    w = rng.standard_normal(shape, np.float32) / np.float32(np.sqrt(np.prod(shape) / shape[0]))
    moved = np.moveaxis(w, axis, -1)
    pairs = np.array([(1, 1, 0, 0), (1, 0, 1, 0), (1, 0, 0, 1), (0, 1, 1, 0), (0, 1, 0, 1), (0, 0, 1, 1)], np.float32)
    moved *= pairs[rng.integers(0, 6, (*moved.shape[:-1], moved.shape[-1] // 4))].reshape(moved.shape)
    return w


def layers_of(channels: int, batch: int, kinds: Iterable[str], pixels: int, rows: int) -> Network:
    """A network of one layer per kind, each with its own input."""
    net = Network(f"crossover{channels}", "source")
    for kind in kinds:
        if kind == "linear":
            x = net.add_input("x_linear", parse_type(f"f32[{batch * rows},{channels}]"))
            y = net.add("MatMul", x, net.constant(two_four_weights((channels, channels), 0), "w_linear"))
        else:
            size = int(kind[0])
            x = net.add_input(f"x_{kind}", parse_type(f"f32[{batch},{channels},{pixels},{pixels}]"))
            w = net.constant(two_four_weights((channels, channels, size, size), 1), f"w_{kind}")
            y = net.add("Conv", x, w, pads=(size // 2,) * 4)
        net.mark_output(y, f"y_{kind}")
    return net


def rows_of(advice: SparsityAdvice, precision: str, batch: int, **more: Any) -> list[dict[str, Any]]:
    """A row per layer of an advice; times in milliseconds."""
    return [
        {
            **more, "kind": x.kind, "channels": x.in_channels, "out_channels": x.out_channels, "precision": precision, "batch": batch,
            "dense_ms": _round(x.dense_ms), "sparse_ms": _round(x.sparse_ms), "speedup": None if x.speedup is None else round(x.speedup, 3),
            "wins": int(x.saved_ms > 0), "dense_tactic": x.dense_tactic, "sparse_tactic": x.sparse_tactic, "reason": x.reason,
        }
        for x in advice.layers
    ]  # fmt: skip


def _round(ms: float | None) -> float | None:
    return None if ms is None else round(ms, 6)


def measure(o: argparse.Namespace, until: float) -> bool:
    """Measures the rows that the file lacks, precision by precision and small channels first. Returns False if the time ended before."""
    keys = [(p, b, c) for p in o.precisions for b in o.batches for c in o.channels]
    for precision, batch, channels in keys:
        known = {(r["precision"], r["batch"], r["channels"], r["kind"]) for r in read(o.output)["rows"]}
        kinds = [k for k in o.kinds if (precision, batch, channels, k) not in known]
        if not kinds:
            continue
        if time.monotonic() > until:
            print(f"time is up before {precision}, batch {batch}, {channels} channels: run again to continue", flush=True)
            return False
        net = layers_of(channels, batch, kinds, o.pixels, o.rows)
        advice = advise_sparsity(net, BuildConfig(backend=o.backend, precisions=PRECISIONS[precision], timing_cache=o.timing_cache))
        rows = rows_of(advice, precision, batch)
        if len(rows) != len(kinds):
            raise SystemExit(f"{len(rows)} layers with weights were lowered from {len(kinds)}: {[r['kind'] for r in rows]}")
        add(o, rows)
        print(
            f"{precision}, batch {batch}, {channels} channels: " + ", ".join(f"{r['kind']} {r['speedup'] or r['reason']}" for r in rows), flush=True
        )
    return True


def measure_networks(o: argparse.Namespace, until: float) -> bool:
    """Measures the layers and the engines of networks of the zoo (random weights). Returns False if the time ended before."""
    from whet import zoo
    from whet.frontends.onnx import network_from_onnx

    for word in o.networks.split(","):
        name, _, size = word.partition(":")
        for precision in o.precisions:
            batch = int(size or 1)
            if any((r["network"], r["precision"], r["batch"]) == (name, precision, batch) for r in read(o.output)["rows"]):
                continue
            if time.monotonic() > until:
                print(f"time is up before {name}: run again to continue", flush=True)
                return False
            net = network_from_onnx(zoo.build(name, batch=batch))
            config = BuildConfig(backend=o.backend, precisions=PRECISIONS[precision], timing_cache=o.timing_cache)
            advice = advise_sparsity(net, config, engines=not o.no_engines)
            rows = [{**r, "layer": x.node} for r, x in zip(rows_of(advice, precision, batch, network=name), advice.layers, strict=True)]
            engine = advice.engine
            whole = {
                "network": name, "layer": "whole network", "kind": "network", "precision": precision, "batch": batch,
                "dense_ms": _round(engine.dense_ms if engine else advice.total_ms + advice.other_ms),
                "sparse_ms": _round(engine.sparse_ms) if engine else None,
                "speedup": round(engine.dense_ms / engine.sparse_ms, 3) if engine else None,
                "wins": int((advice.measured_share or 0.0) > 0),
                "predicted": round(1 / (1 - advice.predicted_share), 3), "reason": advice.verdict,
            }  # fmt: skip
            add(o, [whole, *rows])
            print(f"{name} {advice.label}: {advice.verdict}", flush=True)
    return True


def read(path: Path) -> dict[str, Any]:
    """The result file; without rows if it does not exist."""
    return json.loads(path.read_text()) if path.exists() else {"rows": []}


def add(o: argparse.Namespace, rows: list[dict[str, Any]]) -> None:
    """Adds rows to the result file, with the device and the provenance of this run."""
    with alone(o.output):
        data = {**read(o.output), **provenance(["numpy"]), "device": str(get_backend(o.backend).describe().get("model", o.backend))}
        data["rows"] = [*data["rows"], *rows]
        o.output.write_text(json.dumps(data, indent=1) + "\n")


def merge(parts: list[Path], output: Path) -> None:
    """Joins result files; later rows of the same layer replace earlier ones."""
    rows: dict[tuple, dict[str, Any]] = {}
    head: dict[str, Any] = {}
    for path in [output] * output.exists() + parts:
        data = read(path)
        rows |= {tuple(r.get(k) for k in ("network", "layer", "precision", "batch", "kind", "channels")): r for r in data["rows"]}
        head = data
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps({**head, "rows": list(rows.values())}, indent=1) + "\n")


def crossovers(rows: Iterable[dict[str, Any]]) -> list[str]:
    """A line per kind, precision and batch: the channels at which sparse wins."""
    found: dict[tuple, list[dict[str, Any]]] = {}
    for r in rows:
        found.setdefault((r["kind"], r["precision"], r["batch"]), []).append(r)
    lines = []
    for (kind, precision, batch), group in sorted(found.items()):
        won = [f"{r['channels']} ({r['speedup']}x)" for r in sorted(group, key=lambda r: r["channels"]) if r["wins"]]
        lines.append(f"{kind:7} {precision:5} batch {batch:4}: " + (f"sparse wins at {', '.join(won)}" if won else "sparse never wins"))
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", default="cuda")
    parser.add_argument("--output", type=Path, help="result file (results/h200 for cuda, else results/cpu)")
    parser.add_argument("--seconds", type=float, default=140)
    parser.add_argument("--precisions", default="fp16,int8", help=f"some of {', '.join(PRECISIONS)}")
    parser.add_argument("--batches", default=",".join(map(str, BATCHES)))
    parser.add_argument("--channels", default=",".join(map(str, CHANNELS)))
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--pixels", type=int, default=PIXELS)
    parser.add_argument("--rows", type=int, default=ROWS)
    parser.add_argument("--networks", default="", help="networks of the zoo with their batch, as resnet34:128")
    parser.add_argument("--no-engines", action="store_true", help="--networks without building engines")
    parser.add_argument("--timing-cache", help="file (default: the user's; empty: none)")
    parser.add_argument("--merge", nargs="+", type=Path, help="result files to join into --output")
    o = parser.parse_args()
    until = time.monotonic() + o.seconds
    name = "sparsity_layers.json" if o.networks else "sparsity_crossover.json"
    o.output = o.output or RESULTS / ("h200" if o.backend == "cuda" else o.backend) / name
    o.precisions, o.kinds = o.precisions.split(","), o.kinds.split(",")
    o.batches, o.channels = ([int(v) for v in text.split(",")] for text in (o.batches, o.channels))
    if o.merge:
        merge(o.merge, o.output)
        done = True
    else:
        done = measure_networks(o, until) if o.networks else measure(o, until)
    if not o.networks:
        print("\n".join(crossovers(read(o.output)["rows"])))
    return 0 if done else 3


if __name__ == "__main__":
    raise SystemExit(main())
