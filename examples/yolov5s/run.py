"""YOLOv5s, 640x640, with 40 % of the backbone's and neck's channels cut: what does it bring, batch by batch, on this machine?

    python examples/yolov5s/run.py                                   # CPU, FP32
    python examples/yolov5s/run.py --precisions fp32,bf16 --batches 1,2,4,8
    python examples/yolov5s/run.py --backend cuda --precisions fp32,fp16
    python examples/yolov5s/run.py --backend cuda --precisions fp16 --processes 5
    python examples/yolov5s/run.py --multiple 16                     # about 40 % of every group, to multiples of 16

One engine a row takes every batch from 1 to the largest. The weights are random (nothing can be downloaded), so this is about speed and
about nothing breaking; accuracy after cutting is shown on trained detectors by benchmarks/pruned_detectors.py. The detection heads stay
whole, and channels that are tied together (C3 blocks, the bottlenecks' sums, the concatenations of the neck) are cut together. On a CPU every
width that stays is one its kernels take whole (two blocks of 16, benchmarks/cpu_widths.py), half of most groups and
more of some where images are small; `--widths` tries others.

`floor` is the roofline: the sum over layers of the longer of bytes/bandwidth and FLOPs/peak. On a GPU both are the device's own; on a CPU
the peak is the best rate that a layer of the original reached in its fastest of 50 runs, and the bandwidth that of copies, the fastest of 50
too, as large as what the layer reads and writes (caches are levels of the roofline: Ilic et al. 2014). `flat floor's` on a CPU has the best
bandwidth of any layer, which is a cache's, for all.
It is a floor of the network, not of the engine: layers that an engine computes in one launch (a bottleneck) count as they do one by one. Only
what the heads do behind their convolutions counts as one pass over memory, since engines do it so; `apart` floor's on a CPU counts these layers
one by one too, as all were before an engine had them in one launch (benchmarks of before have no other).
A cut that the machine can see lowers the time at least in step with it. `speed` is the median of the rounds' ratios, `speed_low` and
`speed_high` their least and most; with --processes (two at least) the 95 % interval of the median, over the rounds of all processes.
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
EDGES = {"cpu": 16, "cuda": 32}  # a narrower width costs as much as the next of these: AVX-512 holds 16 numbers, a tensor core's tile 32 channels
#: What stays on a CPU, STRIDE:CHANNELS=WIDTH: half, where images are small 3/4 of 128 and 5/8 of 512: a channel costs less time there
WIDTHS = "2:32=16,4:32=16,4:64=32,8:64=32,8:128=64,16:128=96,16:256=128,32:256=128,32:512=320"
ENOUGH = 6  # rounds that hold a 95 % interval of their median
REPEATED = 50  # runs of layers and copies, of which the fastest counts: a machine's rates are what it does alone
COPIES = [2**k for k in range(18, 29)]  # bytes that copies touch which measure a CPU's bandwidth


@dataclass
class Case:
    """One engine: a network in a precision, and what was measured of it by batch."""

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
    p.add_argument("--precisions", default="fp32", help="fp32 and any of fp16, bf16 (what else a layer may run in), comma-separated")
    p.add_argument("--batches", default="1,2,4,8", help="batches to time; the engines take all up to the largest")
    p.add_argument("--ratio", type=float, help="share of the channels to cut at least, about the same of each group (default on a GPU: 0.4)")
    p.add_argument("--multiple", type=int, help="then kept channels are a multiple of this (default: 16 on a CPU, 32 on a GPU)")
    p.add_argument("--widths", help=f"channels that stay, STRIDE:CHANNELS=WIDTH of images and groups, comma-separated (default on a CPU: {WIDTHS})")
    p.add_argument("--level", type=int, default=3, help="builderOptimizationLevel")
    p.add_argument("--processes", type=int, default=1, help="processes that time the engines, one after the other, each loading their files")
    p.add_argument("--quiet", action="store_true", help="twice as many rounds, of which the half counts beside which a small engine ran fastest")
    p.add_argument("--budget", type=float, default=float("inf"), help="seconds that all may take: fewer processes where there is no time for more")
    p.add_argument("--reuse", action="store_true", help="time the engines that lie in --out, of another run with these widths and batches")
    p.add_argument("--out", default=".yolov5s", help="folder for the ONNX files, the recipe and the engines")
    p.add_argument("--save", help="also write the rows as a result (JSON)")
    args, began = p.parse_args(), time.perf_counter()
    even = args.ratio is not None or args.multiple is not None
    if even and args.widths:
        p.error("--widths says what stays, so --ratio and --multiple have nothing to say: leave one of them out")
    asked = args.widths or ("" if even or args.backend != "cpu" else WIDTHS)
    if wrong := [w for w in asked.split(",") if w and not re.fullmatch(r"\d+:\d+=\d+", w)]:
        p.error(f"--widths: {wrong[0]!r} is no width; write STRIDE:CHANNELS=WIDTH, as 8:128=64")
    words = args.batches.split(",")
    if wrong := [w for w in words if not w.isdigit() or not int(w)]:
        p.error(f"--batches: {wrong[0]!r} is no number of images; write them as 1,2,4,8")
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
        p.error(f"--reuse: the engines in {out} are of another cut; give its --widths, or another --out")
    whet.save_onnx(made.network, out / "yolov5s_pruned.onnx")
    save_recipe(made.recipe, recipe)
    console.print(f"cut {made.share:.1%} of {made.channels[0]} channels in {len(made.recipe.groups)} coupled groups; the heads stay whole")

    cases = []
    for precision in args.precisions.split(","):
        for step, net in (("original", original), ("pruned", made.network)):
            path = out / f"yolov5s_{step}_{precision}.engine"
            if args.reuse and path.exists():
                engine = whet.Runtime(backend=args.backend).load(path)
            else:
                engine = built(net, precision, batches, args, console, f"{step}, {precision}")
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
    """At least that share of the channels cut. Rounding to multiples keeps more of some groups: all are asked for a percent more until it is."""
    made = prune(original, PruneConfig(ratio=ratio, scope="group", multiple=multiple))
    asked = ratio + 0.01
    while made.share < ratio and asked < 1:
        made = prune(original, PruneConfig(ratio=asked, scope="group", multiple=multiple))
        asked += 0.01
    return made


def cut_to(original: Network, asked: str) -> Pruned:
    """Of groups of CHANNELS, made at images IMAGE / STRIDE wide, WIDTH stay; others whole. STRIDE:CHANNELS=WIDTH, comma-separated."""
    wanted = {tuple(map(int, w.partition("=")[0].split(":"))): int(w.partition("=")[2]) for w in asked.split(",") if w}
    made_by = {x.needs(1).name: x for x in original.layers if x.op == "Conv"}
    widths = {g.name: wanted.get((IMAGE // static_dim(made_by[g.name]), g.size), g.size) for g in groups(original)}
    return prune(original, PruneConfig(widths=widths))


def static_dim(conv: Layer) -> int:
    """How wide the images are that a convolution makes."""
    dim = conv.output.shape[-1]
    assert isinstance(dim, int)
    return dim


def built(net: Network, precision: str, batches: list[int], args: argparse.Namespace, console: Console, what: str) -> whet.Engine:
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
    console.print(f"engine ({what}): built and verified in {time.perf_counter() - start:.1f} s")
    for note in plan.report.notes:
        console.print(Text(f"  {note}", "yellow"))  # no markup: it may name whet[jit]
    return whet.Runtime(backend=args.backend).load(plan)


def small(backend: str, path: Path) -> Path:
    """Writes an engine of one convolution that keeps all threads at work for a fraction of a millisecond."""
    net, rng = Network("probe"), np.random.default_rng(0)
    x = net.add_input("x", TensorType(F32, (1, 64, 40, 40)))
    y = net.add("Conv", x, net.constant(rng.standard_normal((64, 64, 3, 3)).astype(np.float32), "w"), pads=(1, 1, 1, 1))
    net.mark_output(net.add("Relu", y), "y")
    whet.build(net, backend=backend).save(path)
    return path


Rate = Callable[[int], float]


@dataclass(frozen=True)
class Roof:
    """What a floor is reckoned with: FLOP/s, bytes/s of a layer that reads and writes so many bytes, and which fused layers count one by one too."""

    flops: float
    moved: Rate
    also: tuple[str, ...] = ()

    def floor_ms(self, engine: whet.Engine, batch: int) -> float:
        """The roofline of all layers at this batch, those that the engine computes in one launch with others counted for themselves."""
        facts = layer_facts(engine.plan, {"images": (batch, 3, IMAGE, IMAGE)})
        return 1e3 * sum(max(n / self.flops, size / self.moved(size)) for f in facts for n, size in count_unfused(f, self.also))


def roofs(engine: whet.Engine) -> dict[str, Roof]:
    """The roofline by name of its column: the machine's own rates where it tells them; else by levels of the memory, and one for all."""
    machine = engine.plan.machine
    if "bytes_per_s" in machine:
        return {"floor": Roof(machine["peak_flops_per_s"], lambda size: machine["bytes_per_s"])}
    layers = fastest(engine)
    flops, best = 1e3 * max(n / ms for n, _, ms in layers), 1e3 * max(n / ms for _, n, ms in layers)
    levels = copies(int(machine.get("threads", 1)))
    return {"floor": Roof(flops, levels), "apart_floor": Roof(flops, levels, ("Moves",)), "flat_floor": Roof(flops, lambda size: best)}


def fastest(engine: whet.Engine) -> list[tuple[float, float, float]]:
    """FLOPs, bytes and milliseconds of the layers at one image, the shortest of many runs. What the builder timed may be of a busier hour, whose peak
    makes a floor that lies above what is measured in another."""
    context = engine.create_context()
    times = context.profile({"images": np.random.default_rng(0).random((1, 3, IMAGE, IMAGE), np.float32)}, REPEATED)
    context.close()
    computed = [bool(f.ms) for f in layer_facts(engine.plan)]  # views take no time
    facts = layer_facts(engine.plan, {"images": (1, 3, IMAGE, IMAGE)})
    return [(f.flops, f.bytes, min(t.times_ms)) for f, t, does in zip(facts, times, computed, strict=True) if does]


def copies(threads: int) -> Rate:
    """Bytes/s, read and written together, of copies that touch so many bytes, by so many threads: measured, larger ones never faster."""
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
    """Flat rows: one a precision, step and batch; `speed` and `floor_speed` are against the original of the same precision and batch."""
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
    """The median of the rounds' ratios, and its 95 % interval where there are enough of them (several processes), else the least and the most."""
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
    """FLOPs against time, one line a precision and batch."""
    lines = []
    for r in rows:
        if not r["case"].endswith("pruned"):
            continue
        whole = next(o for o in rows if o["case"].endswith("original") and (o["precision"], o["batch"]) == (r["precision"], r["batch"]))
        fewer, shorter = 1 - r["gflops"] / whole["gflops"], 1 - r["whet_ms"] / whole["whet_ms"]
        verdict = "in step with the roofline" if r["speed"] >= r["floor_speed"] else f"behind the roofline, which allows {r['floor_speed']:.3f}x"
        if r["speed"] < r["floor_speed"] <= r["speed_high"]:
            verdict += ", by less than the rounds differ" if r["rounds"] < ENOUGH else ", which lies within the 95 % interval"
        verdict += f" ({r['speed_low']:.3f} to {r['speed_high']:.3f})"
        if "apart_floor_speed" in r:
            verdict += f"; with the heads layer by layer it allows {r['apart_floor_speed']:.3f}x"
        lines.append(f"{r['precision']}, batch {r['batch']}: FLOPs -{fewer:.0%}, latency -{shorter:.0%} ({r['speed']:.2f}x), {verdict}")
    return lines


def write(rows: list[dict[str, Any]], path: Path, args: argparse.Namespace) -> None:
    """The rows as a result file, with where they come from."""
    sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
    from _record import command, provenance

    about = provenance(("numpy",)) | {"command": command("examples/yolov5s/run.py")}
    machine = get_backend(args.backend).describe()
    about["machine"] = {k: v for k, v in machine.items() if k in ("model", "name", "cpus", "threads", "driver")}
    path.write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
