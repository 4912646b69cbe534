"""Builds each fine-tuned network in FP32 and INT8 and prints the table that practitioners print: what each step costs and gives.

`build` writes engines and judges them, image by image; `timed` loads those engines and times them, taking turns, so that a busy moment of
the machine hurts all alike (and may be run alone, when the machine is quiet).
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
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
from whet.engine import EnginePlan
from whet.network import Network
from whet.pruning import count_flops, count_params
from whet.runtime import Engine
from whet.sparsity import eligible_layers
from whet.training.data import TrainingData

HERE = Path(__file__).parent
CALIBRATION, ROUNDS, EACH = 256, 40, 10
SHAPES = {"x": (1, 3, 32, 32)}


ROWS = "rows.json"


@dataclass
class Row:
    """One engine of the table; `about` is what was counted and judged when it was built."""

    about: dict[str, object]
    engine: Engine
    times: list[float] = field(default_factory=list)  # milliseconds


def build_all(out: Path, folder: Path, args: argparse.Namespace) -> None:
    """Writes engines and out/rows.json: what each is and what it gets right."""
    import model

    exact, jpeg = cifar.exact_test(folder), cifar.jpeg_test(folder, args.limit or None)
    seen = cifar.normalized(cifar.train_set(folder, CALIBRATION).inputs["x"])
    networks = {"published": model.load(folder)} | {n: whet.network_from_onnx(tuned(n, out)) for n in args.variants if tuned(n, out).exists()}
    base, rows = count_flops(networks["published"]), []
    for name, net in networks.items():
        for precision, plan in plans(net, seen, args.threads):
            file = f"{file_of(name)}.{precision.lower()}.engine"
            whet.write_engine(plan, out / file)
            engine = whet.Runtime(backend="cpu", threads=args.threads).load(plan)
            rows.append({
                "step": f"{name}, {precision}", "file": file, "parameters": count_params(net), "MFLOPs": round(count_flops(net) / 1e6, 1),
                "FLOPs fewer": round(base / count_flops(net), 2), "exact %": round(100 * share_right(engine, exact), 2),
                "JPEG %": round(100 * share_right(engine, jpeg), 2), "2:4 layers": len(eligible_layers(plan.network)[0]),
                "exact images": len(exact), "JPEG images": len(jpeg), "notes": [n for n in plan.report.get("notes", []) if "INT8" in n],
            })  # fmt: skip
            print(f"  {rows[-1]}", flush=True)
    (out / ROWS).write_text(json.dumps(rows, indent=1) + "\n")


def timed(out: Path, args: argparse.Namespace) -> None:
    """Times what build_all wrote, prints the table; with args.save writes resnet56.json there."""
    found = json.loads((out / ROWS).read_text())
    rows = [Row(r, whet.Runtime(backend="cpu", threads=args.threads).load(out / r["file"])) for r in found]
    take_turns(rows)
    show(rows)
    if args.save:
        save(rows, Path(args.save) / "resnet56.json", out, args)


def tuned(name: str, out: Path) -> Path:
    """The fine-tuned network: of this run, else the one that lies in the repository."""
    made = out / f"{file_of(name)}.tuned.onnx"
    return made if made.exists() else HERE / "tuned" / f"{file_of(name)}.onnx"


def plans(net: Network, seen: np.ndarray, threads: int) -> list[tuple[str, EnginePlan]]:
    """The network's FP32 engine and its INT8 one (calibrated on training images without labels)."""
    config = BuildConfig(threads=threads, profiles=((SHAPES, SHAPES, SHAPES),))
    calibration = Calibration(samples=lambda: ({"x": seen[i : i + 1]} for i in range(len(seen))))
    integers = BuildConfig(threads=threads, profiles=config.profiles, precisions=("int8",))
    return [("FP32", build(net, config)), ("INT8", build_int8(net, integers, calibration))]


def share_right(engine: Engine, test: TrainingData) -> float:
    """Share of the test images that the engine gets right, one at a time."""
    x = cifar.normalized(test.inputs["x"])
    with engine.create_context() as context:
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
    about = {k: v for k, v in r.about.items() if k not in ("file", "notes")}
    return about | {
        "median ms": round(float(middle), 3), "quartiles ms": [round(float(low), 3), round(float(high), 3)],
        "speed": round(float(np.median(base.times) / middle), 2), "peak MiB": round(r.engine.memory().peak / 2**20, 2),
    }  # fmt: skip


def show(rows: list[Row]) -> None:
    """The table."""
    from rich.console import Console
    from rich.table import Table

    records = [line(r, rows[0]) for r in rows]
    judged = f"{records[0]['exact images']} exact and {records[0]['JPEG images']} JPEG test images"
    t = Table(title=f"ResNet-56, single images on this CPU; accuracy on {judged}", title_justify="left")
    shown = [k for k in records[0] if k not in ("quartiles ms", "exact images", "JPEG images")]
    for key in shown:
        t.add_column(key, justify="left" if key == "step" else "right")
    for r in records:
        t.add_row(*(f"{r[k]:,}" if k == "parameters" else str(r[k]) for k in shown))
    Console(width=None if sys.stdout.isatty() else 150).print(t)


def save(rows: list[Row], path: Path, out: Path, args: argparse.Namespace) -> None:
    """Writes date, commit, command, machine, versions, rows, and how each network was fine-tuned."""
    sys.path.insert(0, str(HERE.parents[1] / "benchmarks"))
    from _record import command, provenance

    told = {n: json.loads(p.read_text()) for n in ("teacher", *VARIANTS) for p in (told_of(n, out),) if p.exists()}
    result = {
        **provenance(("numpy", "onednn-cpu-gomp")),
        "command": command("examples/resnet56/run.py"),
        "device": rows[0].engine.plan.machine.get("model", platform.processor()),
        "threads": args.threads,
        "rows": [line(r, rows[0]) for r in rows],
        "fine-tuning": {n: {k: v for k, v in d.items() if k != "history"} for n, d in told.items()},
    }
    path.write_text(json.dumps(result, indent=1) + "\n")


def told_of(name: str, out: Path) -> Path:
    """What was written about a fine-tuning: of this run, else the one that lies in the repository."""
    made = out / f"{file_of(name)}.json"
    return made if made.exists() else HERE / "tuned" / f"{file_of(name)}.json"
