"""Builds each fine-tuned network in FP32 and INT8 and prints the table that practitioners print: what each step costs and gives.

Accuracy is that of the engine that is timed, image by image. Engines take turns while they are timed, so that a busy moment hurts all alike.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import json
import platform
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import data as cifar
import numpy as np
from tune import file_of
from variants import VARIANTS

import whet
from whet.builder import BuildConfig, build
from whet.builder.quantized import Calibration, build_int8
from whet.network import Network
from whet.pruning import count_flops, count_params
from whet.runtime import Engine
from whet.sparsity import eligible_layers

HERE = Path(__file__).parent
CALIBRATION, ROUNDS, EACH = 256, 40, 10
SHAPES = {"x": (1, 3, 32, 32)}


@dataclass
class Row:
    """One engine of the table."""

    step: str
    net: Network
    plan: object
    engine: Engine
    exact: float = 0.0
    jpeg: float = 0.0
    times: list[float] = field(default_factory=list)  # milliseconds


def table(out: Path, folder: Path, args: argparse.Namespace) -> None:
    """Builds, judges, times, prints; with args.save writes resnet56.json there too."""
    exact, jpeg = cifar.exact_test(folder), cifar.jpeg_test(folder, args.limit or None)
    seen = cifar.normalized(cifar.train_set(folder, CALIBRATION).inputs["x"])
    import model

    networks = {"published": model.load(folder)} | {n: whet.network_from_onnx(tuned(n, out)) for n in args.variants if tuned(n, out).exists()}
    rows = [r for name, net in networks.items() for r in engines(name, net, seen, args.threads)]
    for r in rows:
        r.exact, r.jpeg = share_right(r, exact), share_right(r, jpeg)
        print(f"  {r.step}: {r.exact:.2%} of {len(exact)} exact images, {r.jpeg:.2%} of {len(jpeg)} JPEG images", flush=True)
    take_turns(rows)
    show(rows, len(exact), len(jpeg))
    if args.save:
        save(rows, Path(args.save) / "resnet56.json", len(jpeg), out, args)


def tuned(name: str, out: Path) -> Path:
    """The fine-tuned network: of this run, else the one that lies in the repository."""
    made = out / f"{file_of(name)}.tuned.onnx"
    return made if made.exists() else HERE / "tuned" / f"{file_of(name)}.onnx"


def engines(name: str, net: Network, seen: np.ndarray, threads: int) -> list[Row]:
    """The network's FP32 engine and its INT8 one (calibrated on training images without labels)."""
    config = BuildConfig(threads=threads, profiles=((SHAPES, SHAPES, SHAPES),))
    calibration = Calibration(samples=lambda: ({"x": seen[i : i + 1]} for i in range(len(seen))))
    made = []
    integers = BuildConfig(threads=threads, profiles=config.profiles, precisions=("int8",))
    for precision, plan in (("FP32", build(net, config)), ("INT8", build_int8(net, integers, calibration))):
        engine = whet.Runtime(backend="cpu", threads=threads).load(plan)
        made.append(Row(f"{name}, {precision}", net, plan, engine))
        print(f"built {name} in {precision}: {plan.report['latency_ms']:.3f} ms", flush=True)
    return made


def share_right(r: Row, test: object) -> float:
    """Share of the test images that the engine gets right, one at a time."""
    x = cifar.normalized(test.inputs["x"])
    with r.engine.create_context() as context:
        guesses = [int(context.run({"x": x[i : i + 1]})["logits"].argmax()) for i in range(len(x))]
    return float((np.array(guesses) == test.labels).mean())


def take_turns(rows: list[Row]) -> None:
    """Single-image runs of all engines in turns."""
    contexts = [r.engine.create_context() for r in rows]
    image = np.random.default_rng(0).standard_normal(SHAPES["x"], np.float32)
    for context in contexts:
        for name in context.input_names:
            array = context.input_array(name)
            array[...] = image
            context.bind(name, array)
        for name in context.output_names:
            context.bind(name, context.output_array(name))
    gc.collect()
    gc.disable()
    for n in range(ROUNDS + 2):
        order = list(zip(contexts, rows, strict=True))
        for context, r in order if n % 2 else order[::-1]:
            for _ in range(EACH):
                start = time.perf_counter()
                context.execute()
                if n >= 2:
                    r.times.append((time.perf_counter() - start) * 1e3)
    gc.enable()


def line(r: Row, base: Row) -> dict[str, object]:
    """One flat record."""
    low, middle, high = np.quantile(r.times, (0.25, 0.5, 0.75))
    sparse = len(eligible_layers(r.net)[0])
    return {
        "step": r.step, "parameters": count_params(r.net), "MFLOPs": round(count_flops(r.net) / 1e6, 1),
        "FLOPs fewer": round(count_flops(base.net) / count_flops(r.net), 2), "exact test %": round(100 * r.exact, 2),
        "JPEG test %": round(100 * r.jpeg, 2), "median ms": round(float(middle), 3), "quartiles ms": [round(float(low), 3), round(float(high), 3)],
        "speed": round(float(np.median(base.times) / middle), 2), "peak MiB": round(r.engine.memory().peak / 2**20, 2), "2:4 layers": sparse,
    }  # fmt: skip


def show(rows: list[Row], exact: int, jpeg: int) -> None:
    """The table."""
    from rich.console import Console
    from rich.table import Table

    t = Table(title=f"ResNet-56, single images on this CPU; accuracy on {exact} exact and {jpeg} JPEG test images", title_justify="left")
    records = [line(r, rows[0]) for r in rows]
    for key in records[0]:
        if key != "quartiles ms":
            t.add_column(key, justify="left" if key == "step" else "right")
    for r in records:
        t.add_row(*(f"{v:,}" if key == "parameters" else str(v) for key, v in r.items() if key != "quartiles ms"))
    Console(width=None if sys.stdout.isatty() else 150).print(t)


def save(rows: list[Row], path: Path, jpeg: int, out: Path, args: argparse.Namespace) -> None:
    """Writes date, commit, command, machine, versions, rows, and how each network was fine-tuned."""
    from importlib.metadata import version

    commit = subprocess.run(["git", "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True, check=False, cwd=HERE)
    told = {n: json.loads(p.read_text()) for n in ("teacher", *VARIANTS) for p in (tuned(n, out).with_name(f"{file_of(n)}.json"),) if p.exists()}
    result = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": commit.stdout.strip(),
        "command": " ".join(["python", "examples/resnet56/run.py", *sys.argv[1:]]),
        "device": getattr(rows[0].plan, "machine", {}).get("model", platform.processor()),
        "threads": args.threads,
        "versions": {n: version(n) for n in ("numpy", "onednn-cpu-gomp")},
        "jpeg test images": jpeg,
        "rows": [line(r, rows[0]) for r in rows],
        "fine-tuning": {n: {k: v for k, v in d.items() if k != "history"} for n, d in told.items()},
    }
    path.write_text(json.dumps(result, indent=1) + "\n")
