"""Quantization-aware training of a fine-tuned ResNet-56 by the command line: train, export with Q/DQ, build in INT8, verify, score.

    python examples/resnet56/qat.py --data DIR --out FOLDER [--variant stages-39] [--backend cuda] [--device cuda] [--save FOLDER]

`whet finetune --qat` continues from the fine-tuned network (in --out, or in tuned/) with that network as teacher. `whet exec` builds the
Q/DQ file, which the builder verifies layer by layer, and the floating-point engine. Both are scored on both test sets and timed
interleaved.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import data as cifar
import numpy as np
from judging import paired, percent, right
from telling import save

import whet
from measure import PRECISIONS, take_turns, tuned

BATCH = 128  # batch of the engines
TRAINING = "--optimizer=adamw --lr=1e-4 --weightDecay=0 --warmup=0 --batch=256 --distill=0.5 --temperature=4 --augment=crop:4,flip --seed=1"


def main() -> None:
    """Runs all steps; prints one row per engine."""
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--data", type=Path, required=True, help="folder that holds cifar10/")
    p.add_argument("--out", type=Path, default=Path(".resnet56"))
    p.add_argument("--variant", default="stages-39")
    p.add_argument("--epochs", type=float, default=6)
    p.add_argument("--seconds", type=float, default=0, help="time limit of the training")
    p.add_argument("--device", default="auto", help="what is trained on")
    p.add_argument("--backend", choices=("cpu", "cuda"), default="cpu", help="what the engines are for")
    p.add_argument("--threads", type=int, default=1, help="CPU threads of the engines")
    p.add_argument("--limit", type=int, default=0, help="use only this many images (to try the script)")
    p.add_argument("--save", type=Path, help="folder for the result (resnet56_qat.json)")
    args = p.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    start = tuned(args.variant, args.out)
    limit = args.limit or None
    sets = {"train": cifar.train_set(args.data, limit), "JPEG": cifar.jpeg_test(args.data, limit), "exact": cifar.exact_test(args.data)}
    for name in ("train", "JPEG"):
        np.savez(args.out / f"{name}.npz", x=sets[name].inputs["x"], labels=sets[name].labels)
    trained, seconds = args.out / f"{args.variant}.qat.onnx", time.perf_counter()
    how = [*TRAINING.split(), f"--epochs={args.epochs}", f"--seconds={args.seconds}", f"--device={args.device}", f"--preprocess={cifar.PREPROCESS}"]
    cli("finetune", start, f"--data={args.out / 'train.npz'}", f"--test={args.out / 'JPEG.npz'}", "--qat", f"--teacher={start}", "-o", trained, *how)
    seconds = time.perf_counter() - seconds
    low = PRECISIONS[args.backend][-2]  # the floating-point type to compare with
    beside = [] if low == "fp32" else [f"--{low}"]
    files = {f"floating point ({low.upper()})": build_engine(start, args, beside),
             "INT8, trained for it": build_engine(trained, args, ["--int8", *beside])}
    runtime = whet.Runtime(backend=args.backend, threads=args.threads)
    engines = {what: runtime.load(f) for what, f in files.items()}
    base, rows = {}, []
    for (what, engine), times in zip(engines.items(), take_turns(list(engines.values()), BATCH, args), strict=True):
        row = {"network": args.variant, "engine": what, "batch": BATCH, "ms": round(float(np.median(times)), 4)}
        for test in ("exact", "JPEG"):
            found = right(engine, sets[test], BATCH)
            row |= {f"{test} %": percent(found), f"{test} images": len(found)}
            if test in base:
                row |= dict(zip((f"{test} points", f"{test} points low", f"{test} points high"), paired(found, base[test]), strict=True))
            base.setdefault(test, found)
        rows.append(row)
        print(json.dumps(row), flush=True)
    if args.save:
        save(rows, args.save / "resnet56_qat.json", args, {"training": {"flags": how, "seconds": round(seconds, 1), "images": len(sets["train"])}})


def build_engine(model: Path, args: argparse.Namespace, permitted: list[str]) -> Path:
    """Builds the engine of a file, verified against the reference."""
    target = args.out / f"{model.stem}.{args.backend}.engine"
    shapes = f"x:{BATCH}x3x32x32"
    cli("exec", f"--onnx={model}", f"--saveEngine={target}", f"--backend={args.backend}", f"--numThreads={args.threads}", "--skipInference",
        f"--minShapes={shapes}", f"--optShapes={shapes}", f"--maxShapes={shapes}", *permitted)  # fmt: skip
    return target


def cli(*words: object) -> None:
    """Runs one command of whet."""
    subprocess.run([sys.executable, "-W", "ignore", "-m", "whet", *map(str, words)], check=True)


if __name__ == "__main__":
    main()
