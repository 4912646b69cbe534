"""ResNet-20 of CIFAR-10 cut to a share of its FLOPs and fine-tuned for the same epochs: whet, Torch-Pruning, and whet's cut in a plain loop.

    python benchmarks/pruning_finetuned.py --data FOLDER --out FOLDER/seed0.json --seeds 0 [--device cuda] [--jpeg] [--cuts FOLDER] [--limit SECONDS]
    python benchmarks/pruning_finetuned.py --merge FOLDER/seed*.json --out benchmarks/results/h100/pruning_finetuned.json

The data are the 4,000 lossless training images, shifted by up to 4 pixels and mirrored; top-1 on the 1,000 lossless test images, and with --jpeg
also on the 10,000 test images as JPEG. All are trained with SGD (Nesterov 0.9, weight decay 5e-4 on matrices, batches of 128, a rate of 0.02 with
warm-up and cosine decay), the same number of images: `whet` by whet's fine-tuning with distillation from the uncut network; `plain loop` is the same
cut with the same inserted batch norms, trained on the labels alone, and Torch-Pruning's networks (see pruning_tools.py), which have no training of
their own, are trained by that loop too. Rows are ordered so that a run that is cut off has all methods and seeds of the smaller budgets. A run
resumes: rows in the file are kept, and no row starts after --limit seconds. --cuts keeps whet's cut networks in a folder (one per seed).

--merge joins files of several processes and compares whet with each other method per budget and test set. d[s, i] is the difference of correctness
(1, 0 or -1) of seed s and image i. The error of its mean has a part of the images, var_i(mean_s d) / images, and a part of the seeds, var_s(mean_i d)
/ seeds; the 95 % interval is that of Student's t with the degrees of freedom of Welch and Satterthwaite. Needs torch, torch-pruning and scipy.
"""

from __future__ import annotations

import argparse
import base64
import copy
import json
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from _record import describe_origin, provenance
from pruning_defaults import IMAGES, normalized
from pruning_tools import by_torch_pruning, module, multiplications
from torch import nn
from two_four_accuracy import decode_jpegs

import whet
from whet.frontends import save_onnx
from whet.network import Network
from whet.pruning import PruneConfig, Target, count_flops, prune
from whet.training import FinetuneConfig, TrainingData, finetune
from whet.training.batch_norms import insert_batch_norms
from whet.training.loop import rate
from whet.training.module import NetworkModule

METHODS = ("whet", "plain loop", "Torch-Pruning L1", "Torch-Pruning Taylor", "Torch-Pruning L2, 5 steps")
DISTILL = 0.9


def augmented(x: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Each image shifted by up to 4 pixels and mirrored half of the time. The generator is of the CPU, so that devices do not differ."""
    n, channels, height, width = x.shape
    dy, dx = torch.randint(0, 9, (2, n), generator=generator).to(x.device)
    mirrored = (torch.rand(n, generator=generator) < 0.5).to(x.device)
    rows = (dy[:, None] + torch.arange(height, device=x.device))[:, None, :, None]
    columns = (dx[:, None] + torch.arange(width, device=x.device))[:, None, None, :]
    samples, planes = torch.arange(n, device=x.device).reshape(-1, 1, 1, 1), torch.arange(channels, device=x.device).reshape(1, -1, 1, 1)
    shifted = nn.functional.pad(x, [4] * 4)[samples, planes, rows, columns]
    return torch.where(mirrored[:, None, None, None], shifted.flip(3), shifted)


def train(net: nn.Module, x: torch.Tensor, y: torch.Tensor, config: FinetuneConfig) -> nn.Module:
    """A plain loop on the labels."""
    net.to(x.device).train()
    generator = torch.Generator().manual_seed(config.seed)
    groups = [{"params": [p for p in net.parameters() if p.ndim > 1], "weight_decay": config.weight_decay},
              {"params": [p for p in net.parameters() if p.ndim <= 1], "weight_decay": 0.0}]  # fmt: skip
    optimizer = torch.optim.SGD(groups, lr=config.lr, momentum=config.momentum, nesterov=True)
    each = len(x) // config.batch
    total = round(config.epochs * each)
    order = torch.zeros(0, dtype=torch.long)
    for step in range(total):
        if len(order) < config.batch:
            order = torch.randperm(len(x), generator=generator)
        at, order = order[: config.batch].to(x.device), order[config.batch :]
        for g in optimizer.param_groups:
            g["lr"] = rate(config, (step + 1) / total)
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(augmented(x[at], generator)), y[at]).backward()
        optimizer.step()
    return net.eval()


def correct(net: nn.Module, x: torch.Tensor, y: torch.Tensor, batch: int = 1000) -> np.ndarray:
    """True for each correctly classified image."""
    net.to(x.device).eval()
    with torch.no_grad():
        return np.concatenate([(net(x[i : i + batch]).argmax(1) == y[i : i + batch]).cpu().numpy() for i in range(0, len(x), batch)])


def jpeg_test(data: Path) -> tuple[np.ndarray, np.ndarray]:
    """The test images of cifar10_jpeg60k.npz (uint8) and their labels."""
    return decode_jpegs(data / "cifar10" / "cifar10_jpeg60k.npz", "test")


def to_text(right: np.ndarray) -> str:
    """One bit per image, in base64."""
    return base64.b64encode(np.packbits(right)).decode()


def to_bits(text: str, count: int) -> np.ndarray:
    """The inverse of to_text, as float64 of 0 and 1."""
    return np.unpackbits(np.frombuffer(base64.b64decode(text), np.uint8), count=count).astype(np.float64)


def interval(differences: np.ndarray) -> tuple[float, float, float]:
    """Mean of [seeds, images] with its 95 % interval over both (see the module's text), in points."""
    from scipy.stats import t as student_t

    seeds, images = differences.shape
    mean = float(differences.mean())
    of_images = float(differences.mean(0).var(ddof=1)) / images
    of_seeds = float(differences.mean(1).var(ddof=1)) / seeds if seeds > 1 else 0.0
    error = of_images + of_seeds
    if not error:
        return 100 * mean, 100 * mean, 100 * mean
    freedom = error**2 / (of_images**2 / (images - 1) + (of_seeds**2 / (seeds - 1) if seeds > 1 else 0.0))
    half = float(student_t.ppf(0.975, freedom)) * error**0.5
    return 100 * mean, 100 * (mean - half), 100 * (mean + half)


def compare(rows: list[dict[str, Any]], sets: dict[str, int]) -> list[dict[str, Any]]:
    """whet against each other method per budget and test set, over the seeds that both have. `verdict`: above, below, level (0 in the interval)."""
    found = []
    by_case = {(r["method"], r["epochs"], r["seed"]): r for r in rows}
    for epochs in sorted({r["epochs"] for r in rows}):
        for method in METHODS[1:]:
            seeds = sorted(s for m, e, s in by_case if m == method and e == epochs and ("whet", epochs, s) in by_case)
            for name, count in sets.items():
                pairs = [(by_case["whet", epochs, s]["right"], by_case[method, epochs, s]["right"]) for s in seeds]
                pairs = [(a[name], b[name]) for a, b in pairs if name in a and name in b]
                if not pairs:
                    continue
                mean, low, high = interval(np.array([to_bits(a, count) - to_bits(b, count) for a, b in pairs]))
                found.append({"epochs": epochs, "against": method, "images": name, "seeds": len(pairs), "points": round(mean, 2),
                              "low": round(low, 2), "high": round(high, 2),
                              "verdict": "above" if low > 0 else "below" if high < 0 else "level"})  # fmt: skip
    return found


def merge(paths: list[Path], out: Path) -> None:
    """Joins the files of several processes and adds the comparisons and the mean of each method's seeds."""
    parts = [json.loads(p.read_text()) for p in paths]
    rows = sorted((r for p in parts for r in p["rows"]), key=lambda r: (r["epochs"], METHODS.index(r["method"]), r["seed"]))
    means = []
    for epochs, method in dict.fromkeys((r["epochs"], r["method"]) for r in rows):
        some = [r for r in rows if (r["epochs"], r["method"]) == (epochs, method)]
        kept = {k: round(float(np.mean([r[k] for r in some])), 2) for k in ("before", "top1", "jpeg") if all(k in r for r in some)}
        means.append({"epochs": epochs, "method": method, "seeds": len(some), **kept})
    plain = [{k: v for k, v in r.items() if k != "right"} for r in rows]
    made = {**parts[0], "rows": plain, "means": means, "compared": compare(rows, parts[0]["sets"])}
    out.write_text(json.dumps(made, indent=1) + "\n")
    for line in made["compared"]:
        print(line)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, help="folder with cifar10/")
    parser.add_argument("--share", type=float, default=0.6, help="FLOPs to keep")
    parser.add_argument("--epochs", nargs="+", type=float, default=[2, 10, 40])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=METHODS)
    parser.add_argument("--device", default="cpu", help="of the training")
    parser.add_argument("--jpeg", action="store_true", help="also test on the 10,000 JPEG images")
    parser.add_argument("--cuts", type=Path, help="folder of whet's cut networks")
    parser.add_argument("--limit", type=float, default=1e9)
    parser.add_argument("--merge", nargs="+", type=Path, help="result files to join")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    if args.merge:
        return merge(args.merge, args.out)
    if args.data is None:
        parser.error("--data is needed")
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    began = time.monotonic()
    arrays = np.load(args.data / "cifar10" / "cifar10_lossless.npz")
    pool, answers = normalized(arrays["x_train"]), np.asarray(arrays["y_train"], np.int64)
    tests = {"top1": (normalized(arrays["x_test"]), np.asarray(arrays["y_test"], np.int64))}
    if args.jpeg:
        x, y = jpeg_test(args.data)
        tests["jpeg"] = (normalized(x), np.asarray(y, np.int64))
    device = torch.device(args.device)
    judged = {n: tuple(torch.from_numpy(a).to(device) for a in pair) for n, pair in tests.items()}
    x, y = torch.from_numpy(pool), torch.from_numpy(answers)
    placed = x.to(device), y.to(device)
    whole = whet.network_from_onnx(args.data / "cifar10" / "resnet20_cifar10.onnx")
    all_of_it = multiplications(module(args.data), x[:1], "shortcut")
    rows: list[dict[str, Any]] = json.loads(args.out.read_text())["rows"] if args.out.exists() else []
    stamp = provenance(("whet", "numpy", "torch", "torch_pruning"))
    machine = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
    networks: dict[tuple[str, int], tuple[Any, float]] = {}

    def test(net: nn.Module) -> dict[str, np.ndarray]:
        return {n: correct(net, *pair) for n, pair in judged.items()}

    def cut_by_whet(seed: int, some: np.ndarray) -> tuple[Network, float]:
        if ("whet", seed) not in networks:
            kept = None if args.cuts is None else args.cuts / f"resnet20_{args.share:g}_seed{seed}.onnx"
            if kept is not None and kept.exists():
                made = whet.network_from_onnx(kept)
            else:
                made = prune(whole, PruneConfig(target=Target("flops", ratio=args.share), seed=seed), {whole.inputs[0].name: pool[some]}).network
                if kept is not None:
                    kept.parent.mkdir(parents=True, exist_ok=True)
                    save_onnx(made, kept)
            networks["whet", seed] = made, count_flops(made) / count_flops(whole)
        return networks["whet", seed]

    Run = tuple[float, dict[str, np.ndarray], dict[str, np.ndarray]]

    def by_whet(seed: int, some: np.ndarray, config: FinetuneConfig) -> Run:
        made, flops = cut_by_whet(seed, some)
        config = FinetuneConfig(epochs=config.epochs, augment="crop:4,flip", distill=DISTILL, holdout=0.0, seed=seed, device=args.device)
        done = finetune(made, TrainingData({whole.inputs[0].name: pool}, answers), config, teacher=whole)
        return flops, test(made.to_torch()), test(done.network.to_torch())

    def by_plain_loop(seed: int, some: np.ndarray, config: FinetuneConfig) -> Run:
        made, flops = cut_by_whet(seed, some)
        data = TrainingData({whole.inputs[0].name: pool}, answers)
        with_norms, _ = insert_batch_norms(made, data, batch=config.batch, device=device, freeze=())
        return flops, test(made.to_torch()), test(train(NetworkModule(with_norms), *placed, config))

    def by_tool(method: str) -> Callable[..., Run]:
        def run(seed: int, some: np.ndarray, config: FinetuneConfig) -> Run:
            if (method, seed) not in networks:
                made = by_torch_pruning(args.data, method, args.share * all_of_it, x[some], y[some], seed)
                networks[method, seed] = made, multiplications(made, x[:1]) / all_of_it
            net, flops = networks[method, seed]
            net = copy.deepcopy(net)
            before = test(net)
            return flops, before, test(train(net, *placed, config))

        return run

    runs = {"whet": by_whet, "plain loop": by_plain_loop, **{m: by_tool(m.removeprefix("Torch-Pruning ")) for m in METHODS[2:]}}
    percent = {f"{n}_whole": round(100 * float(right.mean()), 2) for n, right in test(whole.to_torch()).items()}
    about = {**stamp, "machine": machine, **percent, "sets": {n: len(pair[1]) for n, pair in tests.items()}}
    for epochs, seed, method in ((e, s, m) for e in args.epochs for s in args.seeds for m in args.methods):
        case = {"method": method, "target": args.share, "epochs": epochs, "seed": seed}
        if any({k: r[k] for k in case} == case for r in rows) or time.monotonic() - began > args.limit:
            continue
        some = np.random.default_rng(seed).choice(len(pool), IMAGES, replace=False)
        start = time.perf_counter()
        flops, before, after = runs[method](seed, some, FinetuneConfig(epochs=epochs, seed=seed))
        rows.append({**case, "flops": round(flops, 4), "before": round(100 * float(before["top1"].mean()), 2),
                     **{n: round(100 * float(right.mean()), 2) for n, right in after.items()},
                     "seconds": round(time.perf_counter() - start, 1), **describe_origin(stamp), "machine": machine,
                     "right": {n: to_text(right) for n, right in after.items()}})  # fmt: skip
        print({k: v for k, v in rows[-1].items() if k != "right"}, flush=True)
        args.out.write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
