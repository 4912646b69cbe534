"""One-shot pruning of CIFAR-10's ResNet-20 by whet and by Torch-Pruning at equal FLOPs, with the same 128 images: top-1 on the 1,000 lossless test
images.

    python benchmarks/pruning_tools.py --data FOLDER --out benchmarks/results/cpu/pruning_tools.json [--shares 0.6 0.4] [--seeds 0 1 2]

`cut` is the accuracy without any recovery, `recovered` that after the tool's way to recover without training: whet's least squares (no labels),
and for Torch-Pruning, which has none, batch norms re-estimated on the 128 images. Methods of Torch-Pruning: L1 and L2 norms, group norms over all
layers (DepGraph), Taylor terms (these use the labels of the 128 images), random; `steps` is the number of its iterative steps. Its networks keep at
most the target's share of the multiplications, by bisection of the ratio. Needs torch and torch-pruning.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from _record import provenance
from pruning_defaults import IMAGES, normalized, top1
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[1] / "examples" / "resnet56"))

from rival import CifarResNet

import whet
from whet.pruning import PruneConfig, Target, count_flops, prune

BLOCKS = 3  # of each stage of ResNet-20
CHECKPOINT = "cifar10/resnet/resnet20-12fca82f.th"
#: name -> (importance, its options, whether all layers are ranked together, steps)
METHODS: dict[str, tuple[str, dict[str, Any], bool, int]] = {
    "L1": ("MagnitudeImportance", {"p": 1}, False, 1),
    "L2": ("MagnitudeImportance", {"p": 2}, False, 1),
    "L2, 5 steps": ("MagnitudeImportance", {"p": 2}, False, 5),
    "group norm, global": ("GroupMagnitudeImportance", {"p": 2}, True, 1),
    "Taylor": ("GroupTaylorImportance", {}, False, 1),
    "Taylor, global": ("GroupTaylorImportance", {}, True, 1),
    "random": ("RandomImportance", {}, False, 1),
}


def module(data: Path) -> CifarResNet:
    """The network with the published weights."""
    state = torch.load(data / CHECKPOINT, map_location="cpu", weights_only=True)["state_dict"]
    made = CifarResNet(BLOCKS)
    missing, unexpected = made.load_state_dict({n.removeprefix("module."): t for n, t in state.items()}, strict=False)
    if unexpected or [n for n in missing if "shortcut" not in n and "num_batches" not in n]:
        raise SystemExit(f"the checkpoint does not fit: missing {missing}, unexpected {unexpected}")
    for stage in (made.layer2, made.layer3):
        w = stage[0].shortcut.weight
        with torch.no_grad():
            w.zero_()
            for i in range(w.shape[1]):
                w[i + (w.shape[0] - w.shape[1]) // 2, i] = 1
    return made.eval()


def multiplications(net: nn.Module, x: torch.Tensor, skip: str = "none") -> int:
    """Multiplications of convolutions and linear layers for one image, without those whose name contains `skip`."""
    counts: list[int] = []
    parts = [(n, m) for n, m in net.named_modules() if isinstance(m, nn.Conv2d | nn.Linear) and skip not in n]
    hooks = [m.register_forward_hook(lambda m, _, y: counts.append(m.weight.numel() * int(np.prod(y.shape[2:])))) for _, m in parts]
    with torch.no_grad():
        net(x)
    for h in hooks:
        h.remove()
    return sum(counts)


def accuracy(net: nn.Module, x: torch.Tensor, labels: np.ndarray) -> float:
    """Top-1 in percent."""
    with torch.no_grad():
        return float(100 * np.mean(net(x).argmax(1).numpy() == labels))


def reestimated(net: nn.Module, x: torch.Tensor) -> nn.Module:
    """`net` with batch-norm statistics of `x`."""
    for m in net.modules():
        if isinstance(m, nn.BatchNorm2d):
            m.reset_running_stats()
            m.momentum = None
    net.train()
    with torch.no_grad():
        net(x)
    return net.eval()


def by_torch_pruning(data: Path, method: str, limit: float, x: torch.Tensor, y: torch.Tensor, seed: int) -> nn.Module:
    """The widest network of a method with at most `limit` multiplications."""
    import torch_pruning as tp

    name, options, together, steps = METHODS[method]
    low, high, best = 0.0, 1.0, None
    for _ in range(7):
        torch.manual_seed(seed)
        network, ratio = module(data), (low + high) / 2
        pruner = tp.pruner.MetaPruner(
            network, x[:1], importance=getattr(tp.importance, name)(**options), global_pruning=together, pruning_ratio=ratio, iterative_steps=steps,
            ignored_layers=[network.linear], max_pruning_ratio=0.9,
        )  # fmt: skip
        for _ in range(steps):
            if "Taylor" in name:
                network.zero_grad()
                nn.functional.cross_entropy(network(x), y).backward()
            pruner.step()
        if multiplications(network.eval(), x[:1]) > limit:
            low = ratio
        else:
            high, best = ratio, network
    if best is None:
        raise SystemExit(f"{method}: no ratio leaves {limit:.0f} multiplications")
    return best


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="folder with cifar10/")
    parser.add_argument("--shares", nargs="+", type=float, default=[0.6, 0.4], help="FLOPs to keep")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2], help="one calibration set each")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    arrays = np.load(args.data / "cifar10" / "cifar10_lossless.npz")
    images, labels, pool, answers = normalized(arrays["x_test"]), arrays["y_test"], arrays["x_train"], arrays["y_train"]
    whole = whet.network_from_onnx(args.data / "cifar10" / "resnet20_cifar10.onnx")
    rows: list[dict[str, Any]] = []
    stamp = provenance(("whet", "numpy", "onnxruntime", "torch", "torch_pruning"))
    tested, example = torch.from_numpy(images), torch.zeros(1, 3, 32, 32)
    all_of_it = multiplications(module(args.data), example, "shortcut")  # the published network pads instead

    def add(case: dict[str, Any], start: float, flops: float, cut: float, recovered: float) -> None:
        found = {"flops": round(flops, 4), "cut": round(cut, 2), "recovered": round(recovered, 2)}
        rows.append({**case, **found, "seconds": round(time.perf_counter() - start, 1)})
        print(rows[-1], flush=True)
        if args.out:
            args.out.write_text(json.dumps({**stamp, "top1_whole": top1(whole, images, labels), "rows": rows}, indent=1) + "\n")

    for share in args.shares:
        for seed in args.seeds:
            some = np.random.default_rng(seed).choice(len(pool), IMAGES, replace=False)
            x, y = normalized(pool[some]), np.asarray(answers[some], np.int64)
            start = time.perf_counter()
            done = prune(whole, PruneConfig(target=Target("flops", ratio=share), seed=seed), {whole.inputs[0].name: x})
            case = {"tool": "whet", "method": "default", "target": share, "seed": seed}
            kept = count_flops(done.cut) / count_flops(whole)
            add(case, start, kept, top1(done.cut, images, labels), top1(done.network, images, labels))
            for method in METHODS:
                start, given = time.perf_counter(), torch.from_numpy(x)
                small = by_torch_pruning(args.data, method, share * all_of_it, given, torch.from_numpy(y), seed)
                kept, before = multiplications(small, example) / all_of_it, accuracy(small, tested, labels)
                add({**case, "tool": "Torch-Pruning", "method": method}, start, kept, before, accuracy(reestimated(small, given), tested, labels))


if __name__ == "__main__":
    main()
