"""Builds each fine-tuned network in the precisions of a machine, times the engines and scores them.

`build_all` writes engines, `timed` times them interleaved (both need an idle machine), `judged` scores them. Each adds its results to
out/rows.BACKEND.json, from which telling.py makes tables; the order does not matter after `build_all`.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from pathlib import Path
from typing import Any

import data as cifar
import numpy as np
from judging import paired, percent, right
from tune import file_of
from variants import LONG, MORE, VARIANTS

import whet
from whet.builder import BuildConfig, build
from whet.builder.precision.int8 import Calibration, build_int8
from whet.engine import EnginePlan
from whet.network import Network
from whet.pruning import count_flops, count_params
from whet.runtime import Engine
from whet.sparsity import list_eligible_layers

HERE = Path(__file__).parent
CALIBRATION, ROUNDS, EACH = 256, 40, 10
IMAGE = (3, 32, 32)
PRECISIONS = {"cpu": ("fp32", "int8"), "cuda": ("fp32", "fp16", "int8")}
BATCHES = {"cpu": (1,), "cuda": (1, 128)}  # an engine each
DYNAMIC = 8  # another engine of some networks accepts every batch up to this one
FLEXIBLE = ("original", "depth")  # those


def build_all(out: Path, folder: Path, args: argparse.Namespace) -> None:
    """Writes engines and a row that describes each."""
    import model

    seen = cifar.normalized(cifar.train_set(folder, CALIBRATION).inputs["x"])
    networks = {"published": model.load(folder)} if not args.no_published else {}
    networks |= {n: whet.network_from_onnx(tuned(n, out)) for n in args.variants if tuned(n, out).exists()}
    whole = whet.network_from_onnx(first) if (first := tuned("original", out)).exists() else next(iter(networks.values()))
    base, rows = count_flops(whole), []
    for name, net in networks.items():
        for precision in args.precisions or PRECISIONS[args.backend]:
            sizes = [(b, b) for b in args.batches or BATCHES[args.backend]] + ([(1, DYNAMIC)] if name in FLEXIBLE and not args.no_dynamic else [])
            for which in sizes:
                rows.append(written(out, name, net, precision, which, seen, args) | {"FLOPs fewer": round(base / count_flops(net), 2)})
                print(f"  {rows[-1]}", flush=True)
                write(rows, out, args)


def written(out: Path, name: str, net: Network, precision: str, sizes: tuple[int, int], seen: np.ndarray, args: argparse.Namespace) -> dict[str, Any]:
    """Builds one engine, writes it to `out` and returns its description."""
    began, (low, high) = time.perf_counter(), sizes
    plan = build_plan(net, precision, sizes, seen, args)
    file = f"{file_of(name)}.{precision}.{low}-{high}.{args.backend}.engine"
    whet.write_engine(plan, out / file)
    return {
        "network": name, "precision": precision.upper(), "batches": f"1 to {high}" if low != high else str(high), "file": file,
        "run at": [high] if low == high else [1, high], "parameters": count_params(net), "MFLOPs": round(count_flops(net) / 1e6, 1),
        "2:4 layers": len(list_eligible_layers(plan.network)[0]), **what_was_kept(plan),
        "engine MiB": round((out / file).stat().st_size / 2**20, 2), "built in s": round(time.perf_counter() - began, 1),
    }  # fmt: skip


def tuned(name: str, out: Path) -> Path:
    """The fine-tuned network of this run, or the one in the repository."""
    mine = out / f"{file_of(name)}.tuned.onnx"
    return mine if mine.exists() else HERE / "tuned" / f"{file_of(name)}.onnx"


def build_plan(net: Network, precision: str, sizes: tuple[int, int], seen: np.ndarray, args: argparse.Namespace) -> EnginePlan:
    """An engine for batches from one size to another, tuned for the larger; INT8 is calibrated on training images without labels."""
    low, high = ({"x": (b, *IMAGE)} for b in sizes)
    beside = ("fp16",) if precision == "int8" and args.backend == "cuda" else ()  # where INT8 is not faster
    config = BuildConfig(
        backend=args.backend, threads=args.threads, profiles=((low, high, high),),
        precisions=() if precision == "fp32" else (precision, *beside),
    )  # fmt: skip
    if precision != "int8":
        return build(net, config)
    step = sizes[1]
    batches = [seen[i : i + step] for i in range(0, len(seen) - step + 1, step)]
    return build_int8(net, config, Calibration(samples=lambda: ({"x": b} for b in batches)))


def what_was_kept(plan: EnginePlan) -> dict[str, str]:
    """The engine that an INT8 build selected by time; this may be the one in floating point."""
    kept = next((c.what for c in plan.report.precision_choice if c.kept), None)
    return {} if kept is None else {"kept": kept}


def timed(out: Path, args: argparse.Namespace) -> None:
    """Times every engine interleaved with all others of the same batch."""
    rows = read(out, args)
    runtime = whet.Runtime(backend=args.backend, threads=args.threads)
    engines = [runtime.load(out / r["file"]) for r in rows]
    for batch in sorted({b for r in rows for b in r["run at"]}):
        which = [i for i, r in enumerate(rows) if batch in r["run at"]]
        for i, times in zip(which, take_turns([engines[i] for i in which], batch, args), strict=True):
            low, middle, high = (round(float(q), 4) for q in np.quantile(times, (0.25, 0.5, 0.75)))
            rows[i].setdefault("ms", {})[str(batch)] = {"median": middle, "quartiles": [low, high]}
    for r, e in zip(rows, engines, strict=True):
        r |= {"peak MiB": round(e.memory().peak / 2**20, 2), "timed": time.strftime("%Y-%m-%dT%H:%M", time.gmtime())}
    write(rows, out, args)


def take_turns(engines: list[Engine], batch: int, args: argparse.Namespace) -> list[list[float]]:
    """Milliseconds of interleaved runs of all engines; on a GPU measured by events."""
    contexts = [e.create_context() for e in engines]
    images = np.random.default_rng(0).standard_normal((batch, *IMAGE), np.float32)
    for context in contexts:
        context.set_input_shape("x", images.shape)
        for name in context.input_names:
            array = context.input_array(name)
            array[...] = images
            context.bind(name, array)
        for name in context.output_names:
            context.bind(name, context.output_array(name))
        context.execute()
    found: list[list[float]] = [[] for _ in engines]
    gc.collect()
    gc.disable()
    for n in range(ROUNDS + 2):
        order = list(zip(contexts, found, strict=True))
        for context, times in order if n % 2 else order[::-1]:
            once = _gpu_runs(context) if args.backend == "cuda" else _cpu_runs(context)
            if n >= 2:
                times.extend(once)
    gc.enable()
    for context in contexts:
        context.close()
    return found


def _cpu_runs(context: Any) -> list[float]:
    times = []
    for _ in range(EACH):
        start = time.perf_counter()
        context.execute()
        times.append((time.perf_counter() - start) * 1e3)
    return times


def _gpu_runs(context: Any) -> list[float]:
    return [s * 1e3 for s in context.launches().seconds_in_row(EACH)]


def judged(out: Path, folder: Path, args: argparse.Namespace) -> None:
    """Accuracy of each engine, and its paired difference in points, with a 95 % interval, to the equally fine-tuned original in FP32. Engines
    that differ only in the batch are scored once, with the largest."""
    rows = read(out, args)
    tests = {"exact": cifar.exact_test(folder), "JPEG": cifar.jpeg_test(folder, args.limit or None)}
    runtime, known = whet.Runtime(backend=args.backend, threads=args.threads), {}
    for r in sorted(rows, key=lambda r: -r["run at"][-1]):
        if (key := (r["network"], computed_in(r, args.backend))) not in known:
            engine = runtime.load(out / r["file"])
            known[key] = {name: right(engine, test, r["run at"][-1]) for name, test in tests.items()}
            print(f"  {key}:", {name: percent(k) for name, k in known[key].items()}, flush=True)
    for r in rows:
        base = known.get((beside(r["network"]), "FP32"))
        for name, k in known[r["network"], computed_in(r, args.backend)].items():
            r |= {f"{name} %": percent(k), f"{name} images": len(k)}
            if base is not None:
                r |= dict(zip((f"{name} points", f"{name} points low", f"{name} points high"), paired(k, base[name]), strict=True))
    write(rows, out, args)


def computed_in(row: dict[str, Any], backend: str) -> str:
    """Precision in which an engine computes: an INT8 build keeps floating point where INT8 is not faster."""
    return PRECISIONS[backend][-2].upper() if row.get("kept") == "floating point" else row["precision"]


def beside(name: str) -> str:
    """The original with the same fine-tuning as this network."""
    how = VARIANTS[name].training if name in VARIANTS else None
    return {LONG: "original-long", MORE: "original-more"}.get(how, "original") if how is not None else "original"


def rows_file(out: Path, args: argparse.Namespace) -> Path:
    return out / f"rows.{args.backend}.json"


def read(out: Path, args: argparse.Namespace) -> list[dict]:
    return json.loads(rows_file(out, args).read_text())


def write(rows: list[dict], out: Path, args: argparse.Namespace) -> None:
    rows_file(out, args).write_text(json.dumps(rows, indent=1) + "\n")
