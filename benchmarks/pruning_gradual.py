"""ResNet-20 of CIFAR-10, cut to a share of its FLOPs in one step or gradually during the training: top-1 after the same number of epochs.

    python benchmarks/pruning_gradual.py --data FOLDER --out FOLDER/seed0.json --seeds 0 [--device cuda] [--limit SECONDS] [--workers]
    python benchmarks/pruning_gradual.py --merge FOLDER/seed*.json --out benchmarks/results/h100/pruning_gradual.json

All methods train on the 4,000 lossless images with whet's fine-tuning (distillation from the uncut network at 0.9, shifts and flips, the same
batches and learning rate); nothing is held out. `before` is the default of `whet prune` with least squares on 256 images, then the training.
The others cut inside the training (FinetuneConfig.prune_to): `one cut` at its start, `4 cuts`, `8 cuts` and `16 cuts` in the first half of it,
`linear` with equal shares per cut, `early` in its first quarter; `bf16`, `fp16` and `channels first` are 8 cuts in other formats. Top-1 on the 1,000
lossless and the 10,000 JPEG test images. --workers runs each seed in a process of its own. --merge compares each method with `before`: the 95 %
interval is over images and seeds, as in pruning_finetuned.py.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from _record import provenance
from pruning_defaults import IMAGES, normalized
from pruning_finetuned import DISTILL, correct, interval, jpeg_test, to_bits, to_text

import whet
from whet.network import Network
from whet.pruning import PruneConfig, Target, count_flops, prune
from whet.training import FinetuneConfig, TrainingData, finetune

METHODS: dict[str, dict[str, Any]] = {
    "before": {},
    "one cut": {"prune_steps": 1},
    "8 cuts": {"prune_steps": 8},
    "4 cuts": {"prune_steps": 4},
    "8 cuts, linear": {"prune_steps": 8, "prune_schedule": "linear"},
    "8 cuts, early": {"prune_steps": 8, "prune_end": 0.25},
    "16 cuts": {"prune_steps": 16},
    "8 cuts, bf16": {"prune_steps": 8, "precision": "bf16"},
    "8 cuts, fp16": {"prune_steps": 8, "precision": "fp16"},
    "8 cuts, channels first": {"prune_steps": 8, "channels_last": False},
}


def merge(paths: list[Path], out: Path) -> None:
    """Joins the files of several processes, with the means over the seeds and the comparisons with `before`."""
    parts = [json.loads(p.read_text()) for p in paths]
    rows = sorted((r for p in parts for r in p["rows"]), key=lambda r: (-r["target"], r["epochs"], list(METHODS).index(r["method"]), r["seed"]))
    by_case = {(r["method"], r["target"], r["epochs"], r["seed"]): r for r in rows}
    means, compared = [], []
    for target, epochs, method in dict.fromkeys((r["target"], r["epochs"], r["method"]) for r in rows):
        some = [r for r in rows if (r["target"], r["epochs"], r["method"]) == (target, epochs, method)]
        case = {"target": target, "epochs": epochs, "method": method}
        means.append({**case, "seeds": len(some), **{k: round(float(np.mean([r[k] for r in some])), 2) for k in parts[0]["sets"]}})
        for name, count in parts[0]["sets"].items() if method != "before" else ():
            pairs = [(r["right"][name], by_case["before", target, epochs, r["seed"]]["right"][name]) for r in some
                     if ("before", target, epochs, r["seed"]) in by_case]  # fmt: skip
            if not pairs:
                continue
            mean, low, high = interval(np.array([to_bits(a, count) - to_bits(b, count) for a, b in pairs]))
            verdict = "above" if low > 0 else "below" if high < 0 else "level"
            compared.append(
                {
                    **case,
                    "images": name,
                    "seeds": len(pairs),
                    "points": round(mean, 2),
                    "low": round(low, 2),
                    "high": round(high, 2),
                    "verdict": verdict,
                }
            )
    plain = [{k: v for k, v in r.items() if k != "right"} for r in rows]
    out.write_text(json.dumps({**parts[0], "rows": plain, "means": means, "compared": compared}, indent=1) + "\n")
    for line in (*means, *compared):
        print(line)


def start_workers(args: argparse.Namespace) -> int:
    """One process per seed; their files are named after --out."""
    made = []
    for seed in args.seeds:
        out = args.out.with_name(f"{args.out.stem}_seed{seed}.json")
        more = ["--data", str(args.data), "--device", args.device, "--limit", str(args.limit), "--targets", *map(str, args.targets)]
        more += ["--epochs", *map(str, args.epochs), "--methods", *args.methods, "--seeds", str(seed), "--out", str(out)]
        made.append(subprocess.Popen([sys.executable, __file__, *more]))
    return max(p.wait() for p in made)


def main() -> int:
    """The command line; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, help="folder with cifar10/")
    parser.add_argument("--targets", nargs="+", type=float, default=[0.4, 0.6], help="shares of the FLOPs")
    parser.add_argument("--epochs", nargs="+", type=float, default=[10, 40])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=METHODS)
    parser.add_argument("--device", default="cpu", help="of the training")
    parser.add_argument("--limit", type=float, default=1e9, help="no row starts after so many seconds")
    parser.add_argument("--workers", action="store_true", help="a process for each seed")
    parser.add_argument("--merge", nargs="+", type=Path, help="result files to join")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    if args.merge:
        merge(args.merge, args.out)
        return 0
    if args.data is None:
        parser.error("--data is needed")
    if args.workers:
        return start_workers(args)
    warnings.simplefilter("ignore")
    began = time.monotonic()
    arrays = np.load(args.data / "cifar10" / "cifar10_lossless.npz")
    pool, answers = normalized(arrays["x_train"]), np.asarray(arrays["y_train"], np.int64)
    x, y = jpeg_test(args.data)
    tests = {"top1": (normalized(arrays["x_test"]), np.asarray(arrays["y_test"], np.int64)), "jpeg": (normalized(x), np.asarray(y, np.int64))}
    device = torch.device(args.device)
    judged = {n: tuple(torch.from_numpy(a).to(device) for a in pair) for n, pair in tests.items()}
    whole = whet.network_from_onnx(args.data / "cifar10" / "resnet20_cifar10.onnx")
    data = TrainingData({whole.inputs[0].name: pool}, answers)
    rows: list[dict[str, Any]] = []
    stamp = provenance(("whet", "numpy", "torch"))
    about = {**stamp, "machine": torch.cuda.get_device_name() if device.type == "cuda" else "cpu", "sets": {n: len(p[1]) for n, p in tests.items()}}
    cuts: dict[tuple[float, int], tuple[Network, float]] = {}
    for target, epochs, seed, method in ((t, e, s, m) for t in args.targets for e in args.epochs for s in args.seeds for m in args.methods):
        if time.monotonic() - began > args.limit:
            break
        begun = time.perf_counter()
        config = {"epochs": epochs, "augment": "crop:4,flip", "distill": DISTILL, "holdout": 0.0, "seed": seed, "device": args.device}
        if method == "before":
            if (target, seed) not in cuts:
                some = np.random.default_rng(seed).choice(len(pool), IMAGES, replace=False)
                made = prune(whole, PruneConfig(target=Target("flops", ratio=target), seed=seed), {whole.inputs[0].name: pool[some]}).network
                cuts[target, seed] = made, time.perf_counter() - begun
                begun = time.perf_counter()
            done = finetune(cuts[target, seed][0], data, FinetuneConfig(**config), teacher=whole)
        else:
            done = finetune(whole, data, FinetuneConfig(**config, prune_to=f"flops={target}x", **METHODS[method]), teacher=whole)
        right = {n: correct(done.network.to_torch(), *pair) for n, pair in judged.items()}
        case = {"method": method, "target": target, "epochs": epochs, "seed": seed}
        more = {"cut_seconds": round(cuts[target, seed][1], 1)} if method == "before" else {}
        rows.append({**case, "flops": round(count_flops(done.network) / count_flops(whole), 4),
                     **{n: round(100 * float(r.mean()), 2) for n, r in right.items()}, "seconds": round(time.perf_counter() - begun, 1), **more,
                     "right": {n: to_text(r) for n, r in right.items()}})  # fmt: skip
        print({k: v for k, v in rows[-1].items() if k != "right"}, flush=True)
        args.out.write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
