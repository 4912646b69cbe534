"""ResNet-20 of CIFAR-10 cut to a share of its FLOPs and fine-tuned for the same few epochs: whet, Torch-Pruning, and whet's cut in a plain loop.

    python benchmarks/pruning_finetuned.py --data FOLDER --out benchmarks/results/cpu/pruning_finetuned.json [--share 0.6] [--epochs 2]
        [--seeds 0 1 2] [--limit SECONDS]

The data are the 4,000 lossless training images, shifted by up to 4 pixels and mirrored; top-1 on the 1,000 lossless test images. All are trained with
SGD (Nesterov 0.9, weight decay 5e-4 on matrices, batches of 128, a rate of 0.02 with warm-up and cosine decay), the same images in the same order:
`whet` by whet's fine-tuning with distillation from the uncut network; `plain loop` is the same cut trained on the labels alone, and Torch-Pruning's
networks (see pruning_tools.py), which have no training of their own, are trained by that loop too. A run resumes: rows in the file are kept, and
no row starts after --limit seconds. Needs torch and torch-pruning.
"""

from __future__ import annotations

import argparse
import json
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from _record import provenance
from pruning_defaults import IMAGES, normalized, top1
from pruning_tools import accuracy, by_torch_pruning, module, multiplications
from torch import nn

import whet
from whet.network import Network
from whet.pruning import PruneConfig, Target, count_flops, prune
from whet.training import FinetuneConfig, TrainingData, finetune
from whet.training.loop import rate

METHODS = ("whet", "plain loop", "Torch-Pruning L1", "Torch-Pruning Taylor", "Torch-Pruning L2, 5 steps")
DISTILL = 0.9


def augmented(x: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Each image shifted by up to 4 pixels and mirrored half of the time."""
    padded = nn.functional.pad(x, [4] * 4)
    dy, dx = torch.randint(0, 9, (2, len(x)), generator=generator)
    mirrored = torch.rand(len(x), generator=generator) < 0.5
    made = torch.stack([p[:, i : i + 32, j : j + 32] for p, i, j in zip(padded, dy.tolist(), dx.tolist(), strict=True)])
    return torch.where(mirrored[:, None, None, None], made.flip(3), made)


def train(net: nn.Module, x: torch.Tensor, y: torch.Tensor, config: FinetuneConfig) -> nn.Module:
    """A plain loop on the labels."""
    net.train()
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
        at, order = order[: config.batch], order[config.batch :]
        for g in optimizer.param_groups:
            g["lr"] = rate(config, (step + 1) / total)
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(augmented(x[at], generator)), y[at]).backward()
        optimizer.step()
    return net.eval()


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="folder with cifar10/")
    parser.add_argument("--share", type=float, default=0.6, help="FLOPs to keep")
    parser.add_argument("--epochs", type=float, default=2)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=METHODS)
    parser.add_argument("--limit", type=float, default=1e9)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    began = time.monotonic()
    arrays = np.load(args.data / "cifar10" / "cifar10_lossless.npz")
    images, labels, pool = normalized(arrays["x_test"]), arrays["y_test"], normalized(arrays["x_train"])
    answers = np.asarray(arrays["y_train"], np.int64)
    x, y, tested = torch.from_numpy(pool), torch.from_numpy(answers), torch.from_numpy(images)
    whole = whet.network_from_onnx(args.data / "cifar10" / "resnet20_cifar10.onnx")
    all_of_it = multiplications(module(args.data), x[:1], "shortcut")
    rows: list[dict[str, Any]] = json.loads(args.out.read_text())["rows"] if args.out.exists() else []
    stamp = provenance(("whet", "numpy", "onnxruntime", "torch", "torch_pruning"))

    def cut_by_whet(seed: int, some: np.ndarray) -> Network:
        return prune(whole, PruneConfig(target=Target("flops", ratio=args.share), seed=seed), {whole.inputs[0].name: pool[some]}).network

    def by_whet(seed: int, some: np.ndarray, config: FinetuneConfig) -> tuple[float, float, float]:
        made = cut_by_whet(seed, some)
        config = FinetuneConfig(epochs=args.epochs, augment="crop:4,flip", distill=DISTILL, holdout=0.0, seed=seed)
        done = finetune(made, TrainingData({whole.inputs[0].name: pool}, answers), config, teacher=whole)
        return count_flops(made) / count_flops(whole), top1(made, images, labels), top1(done.network, images, labels)

    def by_plain_loop(seed: int, some: np.ndarray, config: FinetuneConfig) -> tuple[float, float, float]:
        made = cut_by_whet(seed, some)
        net = made.to_torch()
        return count_flops(made) / count_flops(whole), top1(made, images, labels), accuracy(train(net, x, y, config), tested, labels)

    def by_tool(method: str) -> Callable[..., tuple[float, float, float]]:
        def run(seed: int, some: np.ndarray, config: FinetuneConfig) -> tuple[float, float, float]:
            net = by_torch_pruning(args.data, method, args.share * all_of_it, x[some], y[some], seed)
            before = accuracy(net, tested, labels)
            return multiplications(net, x[:1]) / all_of_it, before, accuracy(train(net, x, y, config), tested, labels)

        return run

    runs = {"whet": by_whet, "plain loop": by_plain_loop, **{m: by_tool(m.removeprefix("Torch-Pruning ")) for m in METHODS[2:]}}
    for seed in args.seeds:
        some = np.random.default_rng(seed).choice(len(pool), IMAGES, replace=False)
        for method in args.methods:
            case = {"method": method, "target": args.share, "epochs": args.epochs, "seed": seed}
            if any({k: r[k] for k in case} == case for r in rows) or time.monotonic() - began > args.limit:
                continue
            start = time.perf_counter()
            flops, before, after = runs[method](seed, some, FinetuneConfig(epochs=args.epochs, seed=seed))
            rows.append({**case, "flops": round(flops, 4), "before": round(before, 2), "top1": round(after, 2),
                         "seconds": round(time.perf_counter() - start, 1), "date": stamp["date"], "commit": stamp["commit"]})  # fmt: skip
            print(rows[-1], flush=True)
            args.out.write_text(json.dumps({**stamp, "top1_whole": top1(whole, images, labels), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
