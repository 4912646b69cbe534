"""`make demo`: builds an engine of a trained network, cuts 40 % of its channels, recovers it, builds again, and shows each step in one table.

Everything is measured on this machine: accuracy on test images, and times of verified engines, interleaved. Files are written to
.demo/: the pruned ONNX model, the pruning recipe, the engine.
"""

from __future__ import annotations

import os

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # their spinning threads would disturb those of the engines

import argparse
import dataclasses
import datetime
import gc
import json
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from data import load_heldback, load_train
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

import whet
from whet.builder import build
from whet.builder.precision.int8 import Calibration, build_int8
from whet.cli._build_progress import BuildProgress
from whet.inspector.information import layer_rows
from whet.network import Network
from whet.pruning import PruneConfig, Pruned, compute_zero_fraction, count_flops, count_params, list_matrices, prune, save_recipe, zero_smallest
from whet.runtime import Context, Engine

HERE = Path(__file__).parent
RATIO, ZEROS, CALIBRATION = 0.4, 0.5, 256  # channels cut; weights zeroed in the counter-example; unlabelled training images for recovery
IN_INT8 = 64  # training images (no labels) for INT8 calibration
ROUNDS, EACH = 40, 25  # engines are interleaved: number of rounds, and of runs in each
TOLD: set[str] = set()  # notes that were printed already; a note about every engine is printed once


@dataclass
class Row:
    """One row of the table: a network, its engine if one was built, and its measurements."""

    step: str
    net: Network
    engine: Engine | None = None
    accuracy: float = 0.0
    times: np.ndarray | None = None  # ms, [rounds, runs of a round]

    @property
    def median(self) -> float:
        assert self.times is not None
        return float(np.median(self.times))

    def speed(self, base: Row) -> float:
        """Speed relative to `base`: the median over rounds, which external load in some rounds does not change."""
        assert self.times is not None
        assert base.times is not None
        return float(np.median(np.median(base.times, axis=1) / np.median(self.times, axis=1)))


def main() -> None:
    """Runs all steps and prints the results."""
    args = parser().parse_args()
    console = Console()
    if not console.is_terminal:
        console = Console(width=140)
    out = Path(args.out)
    out.mkdir(parents=True, exist_ok=True)
    images, digits = load_heldback()
    training, _ = load_train()
    started = time.perf_counter()

    console.print(f"[bold]whet[/] on {HERE / 'digits_resnet.onnx'}: a residual network trained on scikit-learn's handwritten digits")
    original = Row("original", whet.network_from_onnx(HERE / "digits_resnet.onnx"))
    build_row(original, console, args)
    made = cut_and_recovered(original.net, training[:CALIBRATION], out, console)
    pruned_row, recovered_row = Row(f"{made.share:.0%} of channels cut", made.cut), Row("  and recovered", made.network)
    pruned_row.accuracy = accuracy_by_onnxruntime(made.cut, images, digits)
    check_onnx_file(made.network, images, digits, out, console)
    build_row(recovered_row, console, args)
    int8_row = Row("  and in INT8", made.network)
    build_row(int8_row, console, args, training[:IN_INT8])
    sparse = Row(f"{ZEROS:.0%} zeros, unstructured", zero_smallest(original.net, ZEROS))
    build_row(sparse, console, args)

    rows = [original, pruned_row, recovered_row, int8_row, sparse]
    timed = [r for r in rows if r.engine is not None]
    for r in timed:
        r.accuracy = accuracy(r, images, digits)
    measure(timed, images[:1], args.rounds)
    console.print()
    console.print(table(rows))
    conclusions(original, recovered_row, sparse, console)
    console.print()
    assert recovered_row.engine is not None
    console.print(layers(recovered_row.engine))
    whet.write_engine(recovered_row.engine.plan, out / "digits_pruned.engine")
    if args.save:
        save(rows, Path(args.save), original.engine)
    console.print(
        f"\n{time.perf_counter() - started:.0f} s. Files in {out}/: digits_pruned.onnx, digits_pruned.recipe.json, digits_pruned.engine"
    )
    console.print(f"Next: whet explain {out}/digits_pruned.engine; whet exec --loadEngine={out}/digits_pruned.engine")


def parser() -> argparse.ArgumentParser:
    """The demo's few options."""
    p = argparse.ArgumentParser(description="Build, prune, recover and compare a model trained on real data.")
    p.add_argument("--out", default=".demo", help="folder for the output files (default: .demo)")
    p.add_argument("--threads", type=int, default=0, help="CPU threads (default: all usable ones)")
    p.add_argument("--save", help="also write the table as a benchmark result (JSON)")
    p.add_argument("--rounds", type=int, default=ROUNDS, help=f"measuring rounds of {EACH} runs (default: {ROUNDS})")
    return p


def build_row(row: Row, console: Console, args: argparse.Namespace, calibration: np.ndarray | None = None) -> None:
    """Builds, verifies and opens the row's engine for single images; with calibration images, in INT8 if that is faster."""
    start = time.perf_counter()
    (x,) = row.net.inputs
    one = {x.name: (1, 1, 32, 32)}
    config = whet.BuildConfig(threads=args.threads, profiles=((one, one, one),), profiling_verbosity="detailed")
    with BuildProgress(console.is_terminal) as progress:
        if calibration is None:
            plan = build(row.net, config, progress=progress)
        else:
            samples = [{x.name: calibration[i : i + 1]} for i in range(len(calibration))]
            int8 = dataclasses.replace(config, precisions=("int8",))
            plan = build_int8(row.net, int8, Calibration(samples=lambda: samples), progress=progress)
    row.engine = whet.Runtime(threads=args.threads).load(plan)
    took = time.perf_counter() - start
    console.print(
        f"engine ({row.step.strip().removeprefix('and ')}): {len(plan.network.layers)} layers, built and verified in {took:.1f} s"
    )
    for note in progress.notes:
        if note not in TOLD:
            console.print(Text(f"  {note}", "yellow"))  # no markup: the note may contain whet[jit]
        TOLD.add(note)


def cut_and_recovered(net: Network, calibration: np.ndarray, out: Path, console: Console) -> Pruned:
    """Cuts the network, recovers it on unlabelled images and saves the recipe."""
    start = time.perf_counter()
    columns = (TextColumn("recovering    "), BarColumn(bar_width=30), TimeElapsedColumn(), TextColumn("[dim]{task.description}"))
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=len(net.layers))
        made = prune(
            net,
            PruneConfig(ratio=RATIO),
            {net.inputs[0].name: calibration},
            lambda done, total, stage: bar.update(task, completed=done, total=total, description=stage),
        )
    before, after = made.channels
    console.print(
        f"cut {before - after} of {before} channels ({made.share:.0%}) in {len(made.recipe.groups)} coupled groups, by their L1 norms"
    )
    took = time.perf_counter() - start
    console.print(f"recovered on {len(calibration)} training images without labels (least squares, batch norms) in {took:.1f} s")
    save_recipe(made.recipe, out / "digits_pruned.recipe.json")
    return made


def check_onnx_file(net: Network, images: np.ndarray, digits: np.ndarray, out: Path, console: Console) -> None:
    """Writes the pruned network as ONNX and runs the file in ONNX Runtime."""
    path = whet.save_onnx(net, out / "digits_pruned.onnx")
    logits = run_onnxruntime(path.read_bytes(), images)
    share = 100 * float((logits.argmax(1) == digits).mean())
    console.print(f"{path}: {path.stat().st_size / 1e6:.2f} MB (was {(HERE / 'digits_resnet.onnx').stat().st_size / 1e6:.2f}); "
                  f"ONNX Runtime runs it: {share:.2f} % of {len(digits)} test images correct")  # fmt: skip


def run_onnxruntime(model: bytes, images: np.ndarray) -> np.ndarray:
    """Logits of all images by ONNX Runtime, which shares no code with whet."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    return session.run(None, {session.get_inputs()[0].name: images})[0]


def accuracy_by_onnxruntime(net: Network, images: np.ndarray, digits: np.ndarray) -> float:
    """Accuracy in percent of a network without an engine."""
    from whet.frontends import onnx_from_network

    return 100 * float((run_onnxruntime(onnx_from_network(net).SerializeToString(), images).argmax(1) == digits).mean())


def accuracy(row: Row, images: np.ndarray, digits: np.ndarray) -> float:
    """Accuracy of the engine in percent of the test images, run one at a time."""
    assert row.engine is not None
    (name,) = row.engine.inputs
    with row.engine.create_context() as context:
        guesses = [int(next(iter(context.run({name: images[i : i + 1]}).values())).argmax()) for i in range(len(images))]
    return 100 * float((np.array(guesses) == digits).mean())


def measure(rows: list[Row], image: np.ndarray, rounds: int) -> None:
    """Times single-image runs of all engines interleaved, so that external load affects all of them."""
    contexts: list[Context] = []
    for r in rows:
        assert r.engine is not None
        context = r.engine.create_context()
        for name in context.input_names:
            array = context.input_array(name)
            array[...] = image
            context.bind(name, array)
        for name in context.output_names:
            context.bind(name, context.output_array(name))
        contexts.append(context)
    times: list[list[float]] = [[] for _ in rows]
    gc.collect()
    gc.disable()
    try:
        for n in range(rounds + 2):
            for context, found in zip(contexts, times, strict=True):
                for _ in range(EACH):
                    start = time.perf_counter()
                    context.execute()
                    if n >= 2:  # two warm-up rounds
                        found.append((time.perf_counter() - start) * 1e3)
    finally:
        gc.enable()
    for r, found, context in zip(rows, times, contexts, strict=True):
        r.times = np.array(found).reshape(rounds, EACH)
        context.close()


def table(rows: list[Row]) -> Table:
    """A table with one row per step."""
    t = Table(title="Handwritten digits, single images, this machine", title_justify="left")
    t.add_column("step")
    for name in ("parameters", "MFLOPs", "accuracy", "median ms", "p99 ms", "images/s", "speed", "peak MiB"):
        t.add_column(name, justify="right")
    for r in rows:
        cells = [r.step, f"{count_params(r.net):,}", f"{count_flops(r.net) / 1e6:.1f}", f"{r.accuracy:.2f} %"]
        if r.engine is None or r.times is None:
            cells += ["-"] * 5
        else:
            peak = r.engine.memory().peak / 2**20
            rate, p99 = 1e3 / r.times.mean(), np.percentile(r.times, 99)
            cells += [f"{r.median:.3f}", f"{p99:.3f}", f"{rate:.0f}", f"{r.speed(rows[0]):.2f}x", f"{peak:.1f}"]
        t.add_row(*cells, style="bold" if r.step.strip().startswith("and rec") else None)
    return t


def record(r: Row, base: Row) -> dict[str, str]:
    """One row of the table as a flat record."""
    cells = {"step": r.step.strip(), "parameters": f"{count_params(r.net):,}", "MFLOPs": f"{count_flops(r.net) / 1e6:.1f}"}
    cells["accuracy %"] = f"{r.accuracy:.2f}"
    if r.engine is None or r.times is None:
        return cells | dict.fromkeys(("median ms", "p99 ms", "images/s", "speed", "peak MiB"), "-")
    cells |= {"median ms": f"{r.median:.3f}", "p99 ms": f"{np.percentile(r.times, 99):.3f}", "images/s": f"{1e3 / r.times.mean():.0f}"}
    return cells | {"speed": f"{r.speed(base):.2f}x", "peak MiB": f"{r.engine.memory().peak / 2**20:.1f}"}


def save(rows: list[Row], path: Path, engine: Engine | None) -> None:
    """Writes the table with date, commit, machine and versions."""
    from importlib.metadata import version

    commit = subprocess.run(["git", "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True, check=False, cwd=HERE)
    result = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": commit.stdout.strip(),
        "command": " ".join(["python", "examples/digits/demo.py", *sys.argv[1:]]),
        "device": engine.plan.machine.get("model", "") if engine else "",
        "versions": {n: version(n) for n in ("numpy", "onednn-cpu-gomp", "llvmlite", "onnxruntime")},
        "rows": [record(r, rows[0]) for r in rows],
    }
    path.write_text(json.dumps(result, indent=1) + "\n")


def conclusions(original: Row, pruned: Row, sparse: Row, console: Console) -> None:
    """The results in words; for the counter-example with the reason."""
    speed, lost = pruned.speed(original), original.accuracy - pruned.accuracy
    console.print(
        f"\nPruned: {speed:.2f}x the original engine's speed, {lost:.2f} points of accuracy lost: whole channels were removed, "
        "so every kernel does less."
    )
    filters = [np.abs(t.array()).reshape(t.array().shape[0], -1).max(1) for t in list_matrices(sparse.net)]
    empty, total = sum(int((f == 0).sum()) for f in filters), sum(len(f) for f in filters)
    took = 1 / sparse.speed(original)
    console.print(
        f"Unstructured: {compute_zero_fraction(sparse.net):.0%} of the weights are zero, the time is {took:.2f}x the original's: no gain. "
        f"The zeros are "
        f"scattered ({empty} of {total} filters are wholly zero), a dense kernel multiplies by zero as by any other number, and no "
        "tactic here skips single zeros: the parameters and FLOPs that the engine works through stay the same. "
        "Only a reduction that the engine can exploit counts."
    )


def layers(engine: Engine) -> Table:
    """The layer table of an engine: kernel, layout, time, and what bounds it."""
    t = Table(title="Layers of the pruned engine, with the times measured by the build", title_justify="left")
    shown = ("tactic", "formats", "ms", "share", "GFLOP/s", "bound")
    t.add_column("layer (+ nodes fused into it)", overflow="fold")
    for c in shown:
        t.add_column(c, justify="right" if c in ("ms", "share", "GFLOP/s") else "left")
    for layer, r in zip(engine.plan.network.layers, layer_rows(engine.plan), strict=True):
        first = layer.sources[0] if layer.sources else r["layer"]
        t.add_row(f"{first} +{len(layer.sources) - 1}" if len(layer.sources) > 1 else first, *(r[c].removeprefix("cpu/") for c in shown))
    return t


if __name__ == "__main__":
    main()
