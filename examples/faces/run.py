"""A face detector (RFB-320, published weights) pruned, recovered without labels, built, timed and scored.

    python examples/fetch.py faces --to data                  # or use a folder that has them; no data is committed
    python examples/faces/run.py --data data                  # CPU: FP32 and INT8
    python examples/faces/run.py --data data --backend cuda   # FP32, FP16

The 24 photos have no labels, so the score is `agreement`: the average precision (IoU 0.5) of an engine's boxes with the confident boxes (score 0.7)
of the unpruned FP32 detector as the truth. Even photos are for least-squares recovery and INT8 calibration, odd photos for scoring. For
additional distillation see benchmarks/distill_detectors.py and docs/results/pruning.md.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

import whet
from support.detection import average_precision, suppress
from whet.builder import build
from whet.builder.precision.int8 import Calibration, build_int8
from whet.cli._build_progress import BuildProgress
from whet.network import Network
from whet.pruning import PruneConfig, Target, count_flops, count_params, prune, save_recipe

MODEL, PHOTOS, SIZE = "face/version-RFB-320.onnx", "face/imgs", (320, 240)
SURE, SEEN, IOU = 0.7, 0.05, 0.4  # score of a true box; minimum score; overlap from which two boxes are one face
PRECISIONS = {"cpu": ("fp32", "int8"), "cuda": ("fp32", "fp16")}
ROUNDS, SECONDS = 7, 0.15  # engines are interleaved: number of rounds, and seconds of each
INPUT = "input"


def main() -> int:
    """Cuts, recovers, builds, scores, times, prints the table; returns the exit code."""
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--data", default="data", help="folder that fetch.py wrote")
    p.add_argument("--backend", choices=tuple(PRECISIONS), default="cpu")
    p.add_argument("--fewer", nargs="*", type=float, default=[0.1, 0.2, 0.3], help="shares of the FLOPs to cut (default: 0.1 0.2 0.3)")
    p.add_argument("--threads", type=int, default=0, help="CPU threads of the engines (default: all)")
    p.add_argument("--out", default=".faces", help="folder for ONNX files, recipes and engines")
    p.add_argument("--save", help="also write the rows as a result (JSON)")
    args = p.parse_args()
    data, out, console = Path(args.data), Path(args.out), Console()
    if not console.is_terminal:
        console = Console(width=150)
    if not (data / MODEL).is_file() or not any((data / PHOTOS).glob("*.jpg")):
        p.exit(1, f"error: {data} has no {MODEL} and {PHOTOS}. Fetch them (python examples/fetch.py faces --to {data}) or pass --data FOLDER.\n")
    if bad := [f for f in args.fewer if not 0 < f < 1]:
        p.error(f"--fewer: {bad[0]} is no share between 0 and 1")
    out.mkdir(parents=True, exist_ok=True)
    feeds = photos(data)
    rows, engines = [], []
    for step, net in list_networks(whet.network_from_onnx(data / MODEL), feeds, args.fewer, out, console):
        for precision in PRECISIONS[args.backend]:
            engine = build_engine(net, precision, feeds, args, console, f"{step}, {precision.upper()}")
            whet.write_engine(engine.plan, out / f"{len(rows)}.engine")
            engines.append(engine)
            rows.append({"step": step, "precision": precision.upper(), "file": f"{len(rows)}.engine", "parameters": count_params(net),
                         "MFLOPs": round(count_flops(net) / 1e6, 1), "peak MiB": round(engine.memory().peak / 2**20, 2)})  # fmt: skip
    judge(rows, engines, feeds)
    measure(rows, engines, feeds[1])
    console.print(table(rows, args.backend))
    if args.save:
        sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
        from _record import command, provenance

        machine = {k: v for k, v in engines[0].plan.machine.items() if k in ("model", "name", "cpus", "threads", "driver")}
        about = provenance(("numpy",)) | {"command": command("examples/faces/run.py"), "machine": machine}
        Path(args.save).write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n")
    return 0


def photos(data: Path) -> list[np.ndarray]:
    """All photos as inputs of the detector: float32 [1,3,240,320], (x - 127) / 128, sorted by name."""
    from PIL import Image

    found = []
    for path in sorted((data / PHOTOS).glob("*.jpg")):
        pixels = np.asarray(Image.open(path).convert("RGB").resize(SIZE, Image.Resampling.BILINEAR), np.float32)
        found.append(np.ascontiguousarray(((pixels - 127) / 128).transpose(2, 0, 1)[None]))
    return found


def list_networks(original: Network, feeds: list[np.ndarray], fewer: list[float], out: Path, console: Console) -> list[tuple[str, Network]]:
    """The unpruned detector, and for each share the cut one before and after recovery."""
    made = [("whole", original)]
    for share in fewer:
        begun = time.perf_counter()
        cut = prune(original, PruneConfig(target=Target("flops", ratio=1 - share), importance="taylor2"), {INPUT: np.concatenate(feeds[::2])})
        whet.save_onnx(cut.network, out / f"faces-{share:g}.onnx")
        save_recipe(cut.recipe, out / f"faces-{share:g}.recipe.json")
        console.print(f"{cut.report.lines()[0]}; cut and recovered in {time.perf_counter() - begun:.0f} s")
        made += [(f"{share:.0%} fewer FLOPs", cut.cut), (f"{share:.0%} fewer, recovered", cut.network)]
    return made


def build_engine(net: Network, precision: str, feeds: list[np.ndarray], args: argparse.Namespace, console: Console, label: str) -> whet.Engine:
    """An engine in this precision; INT8 is calibrated on the even photos and used where it is faster."""
    config = whet.BuildConfig(backend=args.backend, threads=args.threads, precisions=() if precision == "fp32" else (precision,))
    begun = time.perf_counter()
    with BuildProgress(console.is_terminal) as progress:
        if precision == "int8":
            plan = build_int8(net, config, Calibration(samples=lambda: ({INPUT: f} for f in feeds[::2])), progress=progress)
        else:
            plan = build(net, config, progress=progress)
    console.print(f"engine ({label}): built and verified in {time.perf_counter() - begun:.1f} s")
    return whet.Runtime(backend=args.backend).load(plan)


def boxes(out: dict[str, np.ndarray]) -> np.ndarray:
    """Faces in one image: [n,6] with class 0, score, corners."""
    scores, corners = out["scores"][0][:, 1], out["boxes"][0]
    near = np.flatnonzero(scores > SEEN)
    kept = near[suppress(corners[near], scores[near], IOU)]
    return np.concatenate([np.zeros((len(kept), 1)), scores[kept, None], corners[kept]], 1)


def judge(rows: list[dict[str, Any]], engines: list[whet.Engine], feeds: list[np.ndarray]) -> None:
    """Adds `agreement` and the number of confident faces of each engine, on the odd photos; the first engine is the unpruned detector in FP32."""
    found = []
    for engine in engines:
        with engine.create_context() as context:
            found.append([boxes(context.run({INPUT: f})) for f in feeds[1::2]])
    truth = [b[b[:, 1] >= SURE][:, [0, 2, 3, 4, 5]] for b in found[0]]
    for row, mine in zip(rows, found, strict=True):
        row |= {"agreement": round(average_precision(mine, truth), 4), "faces": int(sum((b[:, 1] >= SURE).sum() for b in mine)),
                "of": sum(map(len, truth)), "photos": len(truth)}  # fmt: skip


def measure(rows: list[dict[str, Any]], engines: list[whet.Engine], feed: np.ndarray) -> None:
    """Adds the median time per photo, all engines interleaved, and the median ratio to the first engine within rounds."""
    bounds = []
    for context in [e.create_context() for e in engines]:
        context.set_input_shape(INPUT, feed.shape)
        bounds.append(context.launches())
        bounds[-1].feed({INPUT: feed})
        bounds[-1].run()
    times: list[list[float]] = [[] for _ in engines]
    for n in range(ROUNDS):
        for k in range(len(engines))[:: -1 if n % 2 else 1]:
            runs, until = [], time.perf_counter() + SECONDS
            while time.perf_counter() < until:
                runs += bounds[k].seconds_in_row(5)
            times[k].append(median(runs) * 1e3)
    for row, ms in zip(rows, times, strict=True):
        ratios = [w / t for w, t in zip(times[0], ms, strict=True)]
        row |= {"ms": round(median(ms), 4), "photos/s": round(1e3 / median(ms)), "speed": round(median(ratios), 3)}


def table(rows: list[dict[str, Any]], backend: str) -> Table:
    """The rows as a table for the terminal."""
    t = Table(title=f"Face detector RFB-320 on {backend}; agreement with the unpruned detector on {rows[0]['photos']} photos", title_justify="left")
    columns = ("step", "precision", "parameters", "MFLOPs", "agreement", "faces", "ms", "photos/s", "speed", "peak MiB")
    for c in columns:
        t.add_column(c, justify="left" if c in ("step", "precision") else "right")
    for r in rows:
        t.add_row(*(f"{r[c]:,}" if isinstance(r[c], int) else str(r[c]) for c in columns))
    return t


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        print("\nstopped. Measured times are in the timing cache, so the same command will be faster.", file=sys.stderr)
        sys.exit(130)
