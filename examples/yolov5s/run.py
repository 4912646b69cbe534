"""YOLOv5s, 640x640, with 40 % of the backbone's and neck's channels cut: its speed on this machine, batch by batch.

    python examples/yolov5s/run.py                                   # CPU, FP32
    python examples/yolov5s/run.py --precisions fp32,bf16 --batches 1,2,4,8
    python examples/yolov5s/run.py --backend cuda --precisions fp32,fp16
    python examples/yolov5s/run.py --backend cuda --precisions fp16 --processes 5
    python examples/yolov5s/run.py --multiple 16                     # about 40 % of every group, to multiples of 16

Each row is one engine for every batch from 1 to the largest. The weights are random, so this measures speed only; for accuracy after pruning
see benchmarks/pruned_detectors.py. The detection heads are not cut, and channels that depend on each other (C3 blocks, sums of bottlenecks,
concatenations of the neck) are cut together. On a CPU the widths kept are those that kernels compute without remainder (two blocks of 16,
benchmarks/cpu_widths.py); `--widths` sets others.

`floor` is the roofline: the sum over layers of the larger of bytes/bandwidth and FLOPs/peak. On a GPU both are properties of the device. On a CPU
the peak is the best rate that a layer of the original reached in its fastest of 50 runs, and the bandwidth that of copies of the size that the
layer reads and writes, the fastest of 50 too (caches are levels of the roofline: Ilic et al. 2014). `flat_floor_speed` on a CPU uses the best
bandwidth of any layer, which is that of a cache, for all layers.
It is a floor of the network, not of the engine: layers that an engine computes in one launch count separately. Only the layers after the
heads' convolutions count as one pass over memory, as engines compute them; `apart_floor_speed` on a CPU counts these separately too.
A cut that the engine can exploit reduces the time at least as much as the floor. `speed` is the median of the ratios of all rounds, `speed_low` and
`speed_high` their minimum and maximum; with --processes (at least two) the 95 % interval of the median over the rounds of all processes.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text
from timing import IMAGE, Times, measure, measure_apart

import whet
from whet.backends import get_backend
from whet.cli._build_progress import BuildProgress
from whet.inspector.facts import layer_facts
from whet.inspector.unfused_counts import count_unfused
from whet.network import F32, Layer, Network, TensorType
from whet.pruning import PruneConfig, Pruned, count_flops, count_params, groups, load_recipe, prune, save_recipe
from whet.zoo import save

RATIO = 0.4
EDGES = {"cpu": 16, "cuda": 32}  # other widths cost as much as the next multiple: AVX-512 registers hold 16 values, tensor-core tiles 32 channels
#: Widths kept on a CPU, STRIDE:CHANNELS=WIDTH: half, on small images 3/4 of 128 and 5/8 of 512, where a channel takes less time
WIDTHS = "2:32=16,4:32=16,4:64=32,8:64=32,8:128=64,16:128=96,16:256=128,32:256=128,32:512=320"
ENOUGH = 6  # minimum rounds for a 95 % interval of the median
REPEATED = 50  # runs of layers and copies, of which the fastest counts: peak rates are without external load
COPIES = [2**k for k in range(18, 29)]  # bytes touched by the copies that measure a CPU's bandwidth


@dataclass
class Case:
    """One engine: a network in a precision, with its measurements per batch."""

    step: str
    precision: str
    net: Network
    engine: whet.Engine
    path: Path
    times: Times = field(default_factory=Times)


def main() -> int:
    """Cuts, builds, measures, prints the table; returns the exit code."""
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0], formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--backend", choices=("cpu", "cuda"), default="cpu")
    p.add_argument("--precisions", default="fp32", help="fp32 and any of fp16, bf16 (additional types that layers may use), comma-separated")
    p.add_argument("--batches", default="1,2,4,8", help="batches to time; engines accept all up to the largest")
    p.add_argument("--ratio", type=float, help="minimum share of channels to cut, about the same of each group (default on a GPU: 0.4)")
    p.add_argument("--multiple", type=int, help="with --ratio: kept channels are a multiple of this (default: 16 on a CPU, 32 on a GPU)")
    p.add_argument("--widths", help=f"channels to keep, STRIDE:CHANNELS=WIDTH of images and groups, comma-separated (default on a CPU: {WIDTHS})")
    p.add_argument("--level", type=int, default=3, help="builderOptimizationLevel")
    p.add_argument("--processes", type=int, default=1, help="number of processes that time the engines, one after the other")
    p.add_argument("--quiet", action="store_true", help="time twice as many rounds; only the half during which a probe engine ran fastest counts")
    p.add_argument("--budget", type=float, default=float("inf"), help="time limit in seconds; reduces the number of processes if necessary")
    p.add_argument("--reuse", action="store_true", help="time the engines in --out from an earlier run with the same widths and batches")
    p.add_argument("--out", default=".yolov5s", help="folder for the ONNX files, the recipe and the engines")
    p.add_argument("--save", help="also write the rows as a result (JSON)")
    args, began = p.parse_args(), time.perf_counter()
    even = args.ratio is not None or args.multiple is not None
    if even and args.widths:
        p.error("--widths and --ratio/--multiple exclude each other: remove one of them")
    asked = args.widths or ("" if even or args.backend != "cpu" else WIDTHS)
    if wrong := [w for w in asked.split(",") if w and not re.fullmatch(r"\d+:\d+=\d+", w)]:
        p.error(f"--widths: {wrong[0]!r} is not a width; write STRIDE:CHANNELS=WIDTH, for example 8:128=64")
    words = args.batches.split(",")
    if wrong := [w for w in words if not w.isdigit() or not int(w)]:
        p.error(f"--batches: {wrong[0]!r} is not a batch size; write them as 1,2,4,8")
    batches = sorted(map(int, words))
    console = Console()
    if not console.is_terminal:
        console = Console(width=150)
    out = Path(args.out)
    out.mkdir(parents=True, exist_ok=True)

    original = whet.network_from_onnx(save("yolov5s", out / "yolov5s.onnx"))
    if asked:
        made = cut_to(original, asked)
    else:
        made = cut(original, RATIO if args.ratio is None else args.ratio, args.multiple or EDGES[args.backend])
    recipe = out / "yolov5s_pruned.recipe.json"
    if args.reuse and recipe.exists() and load_recipe(recipe).groups != made.recipe.groups:
        p.error(f"--reuse: the engines in {out} belong to another cut; pass its --widths or another --out")
    whet.save_onnx(made.network, out / "yolov5s_pruned.onnx")
    save_recipe(made.recipe, recipe)
    console.print(f"cut {made.share:.1%} of {made.channels[0]} channels in {len(made.recipe.groups)} coupled groups; the heads are not cut")

    cases = []
    for precision in args.precisions.split(","):
        for step, net in (("original", original), ("pruned", made.network)):
            path = out / f"yolov5s_{step}_{precision}.engine"
            if args.reuse and path.exists():
                engine = whet.Runtime(backend=args.backend).load(path)
            else:
                engine = build_engine(net, precision, batches, args, console, f"{step}, {precision}")
                whet.write_engine(engine.plan, path)
            cases.append(Case(step, precision, net, engine, path))
    probe = small(args.backend, out / "probe.engine") if args.quiet else None
    if args.processes > 1:
        found = measure_apart([c.path for c in cases], batches, args.backend, args.processes, began + args.budget, probe)
    else:
        found = measure([c.engine for c in cases], batches, args.backend, probed=whet.Runtime(backend=args.backend).load(probe) if probe else None)
    if probe:
        for times in found:
            times.keep_quiet()
    for case, times in zip(cases, found, strict=True):
        case.times = times
    rows = records(cases, batches)
    console.print(table(rows, args.backend))
    for line in conclusions(rows):
        console.print(line)
    if args.save:
        write(rows, Path(args.save), args)
    return 0


def cut(original: Network, ratio: float, multiple: int) -> Pruned:
    """Cuts at least this share of the channels. Rounding keeps more of some groups, so the request grows by a percent until the share is reached."""
    made = prune(original, PruneConfig(ratio=ratio, scope="group", multiple=multiple))
    asked = ratio + 0.01
    while made.share < ratio and asked < 1:
        made = prune(original, PruneConfig(ratio=asked, scope="group", multiple=multiple))
        asked += 0.01
    return made


def cut_to(original: Network, widths: str) -> Pruned:
    """Keeps WIDTH of the groups with CHANNELS channels on images of width IMAGE / STRIDE; other groups stay whole. `asked` as in --widths."""
    wanted = {tuple(map(int, w.partition("=")[0].split(":"))): int(w.partition("=")[2]) for w in widths.split(",") if w}
    made_by = {x.needs(1).name: x for x in original.layers if x.op == "Conv"}
    widths = {g.name: wanted.get((IMAGE // static_dim(made_by[g.name]), g.size), g.size) for g in groups(original)}
    return prune(original, PruneConfig(widths=widths))


def static_dim(conv: Layer) -> int:
    """Width of a convolution's output image."""
    dim = conv.output.shape[-1]
    assert isinstance(dim, int)
    return dim


def build_engine(net: Network, precision: str, batches: list[int], args: argparse.Namespace, console: Console, label: str) -> whet.Engine:
    """An engine for every batch from 1 to the largest, tuned for the largest."""
    low, high = ({"images": (b, 3, IMAGE, IMAGE)} for b in (1, batches[-1]))
    config = whet.BuildConfig(
        backend=args.backend,
        precisions=() if precision == "fp32" else (precision,),
        profiles=((low, high, high),),
        optimization_level=args.level,
    )
    start = time.perf_counter()
    with BuildProgress(console.is_terminal) as progress:
        plan = whet.builder.build(net, config, progress=progress)
    console.print(f"engine ({label}): built and verified in {time.perf_counter() - start:.1f} s")
    for note in plan.report.notes:
        console.print(Text(f"  {note}", "yellow"))  # no markup: the note may contain whet[jit]
    return whet.Runtime(backend=args.backend).load(plan)


def small(backend: str, path: Path) -> Path:
    """Writes an engine of one convolution that uses all threads for a fraction of a millisecond."""
    net, rng = Network("probe"), np.random.default_rng(0)
    x = net.add_input("x", TensorType(F32, (1, 64, 40, 40)))
    y = net.add("Conv", x, net.constant(rng.standard_normal((64, 64, 3, 3)).astype(np.float32), "w"), pads=(1, 1, 1, 1))
    net.mark_output(net.add("Relu", y), "y")
    whet.build(net, backend=backend).save(path)
    return path


Rate = Callable[[int], float]


@dataclass(frozen=True)
class Roof:
    """Parameters of a floor: FLOP/s, bytes/s as a function of the bytes touched by a layer, and fused layers that count separately too."""

    flops: float
    moved: Rate
    also: tuple[str, ...] = ()

    def floor_ms(self, engine: whet.Engine, batch: int) -> float:
        """The roofline of all layers at this batch; fused layers count separately."""
        facts = layer_facts(engine.plan, {"images": (batch, 3, IMAGE, IMAGE)})
        return 1e3 * sum(max(n / self.flops, size / self.moved(size)) for f in facts for n, size in count_unfused(f, self.also))


def roofs(engine: whet.Engine) -> dict[str, Roof]:
    """Rooflines by column name: from the device's rates if it reports them; otherwise by levels of the memory, and with one bandwidth for all."""
    machine = engine.plan.machine
    if "bytes_per_s" in machine:
        return {"floor": Roof(machine["peak_flops_per_s"], lambda size: machine["bytes_per_s"])}
    layers = fastest(engine)
    flops, best = 1e3 * max(n / ms for n, _, ms in layers), 1e3 * max(n / ms for _, n, ms in layers)
    levels = copies(int(machine.get("threads", 1)))
    return {"floor": Roof(flops, levels), "apart_floor": Roof(flops, levels, ("Moves",)), "flat_floor": Roof(flops, lambda size: best)}


def fastest(engine: whet.Engine) -> list[tuple[float, float, float]]:
    """FLOPs, bytes and milliseconds of the layers at batch 1, the shortest of many runs. The builder's own times may come from a busier hour and
    would give a floor above later measurements."""
    context = engine.create_context()
    times = context.profile({"images": np.random.default_rng(0).random((1, 3, IMAGE, IMAGE), np.float32)}, REPEATED)
    context.close()
    computed = [bool(f.ms) for f in layer_facts(engine.plan)]  # views take no time
    facts = layer_facts(engine.plan, {"images": (1, 3, IMAGE, IMAGE)})
    return [(f.flops, f.bytes, min(t.times_ms)) for f, t, does in zip(facts, times, computed, strict=True) if does]


def copies(threads: int) -> Rate:
    """Measured bytes/s (reads plus writes) of copies by bytes touched, for a number of threads; larger copies are never faster."""
    found: list[tuple[int, float]] = []
    with ThreadPoolExecutor(threads) as pool:
        for size in COPIES:
            pairs = [(np.ones(size // (8 * threads), np.float32), np.zeros(size // (8 * threads), np.float32)) for _ in range(threads)]
            turns = max(1, COPIES[-1] // size)

            def copy(pair: tuple[np.ndarray, np.ndarray], turns: int = turns) -> None:
                for _ in range(turns):
                    np.copyto(pair[1], pair[0])

            took = []
            for _ in range(REPEATED):
                start = time.perf_counter()
                list(pool.map(copy, pairs))
                took.append(time.perf_counter() - start)
            found.append((size, turns * size / min(took)))
    rates = [(size, max(r for other, r in found if other >= size)) for size, r in found]
    return lambda size: next((r for most, r in rates if size <= most), rates[-1][1])


def records(cases: list[Case], batches: list[int]) -> list[dict[str, Any]]:
    """Flat rows, one per precision, step and batch; `speed` and `floor_speed` are relative to the original of the same precision and batch."""
    rows = []
    wholes: dict[str, Case] = {}
    known: dict[str, dict[str, Roof]] = {}
    for case in cases:
        whole = wholes.setdefault(case.precision, case)
        if case is whole:
            known[case.precision] = roofs(case.engine)
        for batch in batches:
            ms = statistics.median(case.times.ms[batch])
            speed, low, high = interval([a / b for a, b in zip(whole.times.ms[batch], case.times.ms[batch], strict=True)])
            floors: dict[str, float] = {}
            for name, roof in known[case.precision].items():
                least = roof.floor_ms(case.engine, batch)
                floors |= {f"{name}_ms": round(least, 4), f"{name}_speed": round(roof.floor_ms(whole.engine, batch) / least, 3)}
            row = {
                "case": f"yolov5s {case.step}",
                "precision": case.precision,
                "batch": batch,
                "parameters": count_params(case.net),
                "gflops": round(batch * count_flops(case.net) / 1e9, 3),
                "whet_ms": round(ms, 4),
                "ms_low": round(min(case.times.ms[batch]), 4),
                "ms_high": round(max(case.times.ms[batch]), 4),
                "images_per_s": round(batch * 1e3 / ms, 1),
                "speed": round(speed, 3),
                "speed_low": round(low, 3),
                "speed_high": round(high, 3),
                "rounds": len(case.times.ms[batch]),
                **floors,
                "peak_mib": round(case.engine.memory().peak / 2**20, 1),
            }
            if power := case.times.power[batch]:
                row |= {"power_w": round(statistics.mean(power), 1), "gpu_busy_percent": round(statistics.mean(case.times.busy[batch]), 1)}
            rows.append(row)
    return rows


def interval(ratios: list[float]) -> tuple[float, float, float]:
    """The median of the ratios of all rounds, and its 95 % interval if there are enough rounds (several processes), else minimum and maximum."""
    if len(ratios) < ENOUGH:
        return statistics.median(ratios), min(ratios), max(ratios)
    sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
    from _record import median_interval

    return median_interval(ratios)


def table(rows: list[dict[str, Any]], backend: str) -> Table:
    """The rows as a table for the terminal."""
    t = Table(title=f"YOLOv5s 640x640 on {backend}", title_justify="left")
    columns = {"case": "network", "precision": "type", "batch": "batch", "parameters": "parameters", "gflops": "GFLOPs", "whet_ms": "ms",
               "images_per_s": "frames/s", "speed": "speed", "floor_ms": "floor ms", "floor_speed": "floor's", "apart_floor_speed": "apart floor's",
               "flat_floor_speed": "flat floor's",
               "peak_mib": "MiB", "power_w": "W", "gpu_busy_percent": "GPU %"}  # fmt: skip
    shown = [k for k in columns if any(k in r for r in rows)]
    for k in shown:
        t.add_column(columns[k], justify="left" if k in ("case", "precision") else "right")
    for r in rows:
        t.add_row(*(f"{r[k]:,}" if isinstance(r.get(k), int) else str(r.get(k, "-")) for k in shown))
    return t


def conclusions(rows: list[dict[str, Any]]) -> list[str]:
    """FLOPs against time, one line per precision and batch."""
    lines = []
    for r in rows:
        if not r["case"].endswith("pruned"):
            continue
        whole = next(o for o in rows if o["case"].endswith("original") and (o["precision"], o["batch"]) == (r["precision"], r["batch"]))
        fewer, shorter = 1 - r["gflops"] / whole["gflops"], 1 - r["whet_ms"] / whole["whet_ms"]
        verdict = "in step with the roofline" if r["speed"] >= r["floor_speed"] else f"slower than the roofline allows ({r['floor_speed']:.3f}x)"
        if r["speed"] < r["floor_speed"] <= r["speed_high"]:
            verdict += ", by less than the spread of the rounds" if r["rounds"] < ENOUGH else ", which is within the 95 % interval"
        verdict += f" ({r['speed_low']:.3f} to {r['speed_high']:.3f})"
        if "apart_floor_speed" in r:
            verdict += f"; with separate layers in the heads it allows {r['apart_floor_speed']:.3f}x"
        lines.append(f"{r['precision']}, batch {r['batch']}: FLOPs -{fewer:.0%}, latency -{shorter:.0%} ({r['speed']:.2f}x), {verdict}")
    return lines


def write(rows: list[dict[str, Any]], path: Path, args: argparse.Namespace) -> None:
    """Writes the rows as a result file with their origin."""
    sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
    from _record import command, provenance

    about = provenance(("numpy",)) | {"command": command("examples/yolov5s/run.py")}
    machine = get_backend(args.backend).describe()
    about["machine"] = {k: v for k, v in machine.items() if k in ("model", "name", "cpus", "threads", "driver")}
    path.write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
