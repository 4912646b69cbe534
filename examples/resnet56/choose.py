"""Selects the channels and blocks to remove and writes recipes/NAME.json, which variants.py reads.

    python examples/resnet56/choose.py DATA [NAME ...] [--backend cuda]     # on the target machine while it is idle; takes minutes

Importance (second-order Taylor terms of the loss on labelled training images) and knapsack (over the inner channels of all blocks and the blocks
themselves) are the same for all; the objective is either measured milliseconds (whet latency-table) or FLOPs. With `stages`, the
number of blocks kept in each stage is given (those with the largest terms), and the knapsack selects channels only.
"""

from __future__ import annotations

import os

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import argparse
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import data as cifar
import model
import numpy as np

import whet
from whet.builder import BuildConfig
from whet.network import Network
from whet.pruning import branches, count_flops, cut, groups, importance
from whet.pruning.costs import make_flop_costs
from whet.pruning.coupling import Group
from whet.pruning.depth import Branch, remove_branches
from whet.pruning.importance import Samples
from whet.pruning.knapsack import Choice, choose_within
from whet.pruning.latency_cost import lower_to_static_layers, make_latency_costs
from whet.pruning.latency_table import LatencyTable
from whet.pruning.meter import Meter
from whet.pruning.recipe import make_pruning_recipe, save_recipe

IMAGES, MULTIPLE = 192, {"cpu": 4, "cuda": 8}  # widths are multiples of this: the GPU's kernels read 16 bytes at a time


@dataclass(frozen=True)
class Aim:
    """An objective with its target, and the engine for which layers are timed."""

    objective: str  # latency | flops
    share: float
    backend: str = "cpu"
    precision: str = "fp32"
    batch: int = 1
    stages: tuple[int, ...] = ()
    multiple: int = 0  # of widths; 0: MULTIPLE of the backend


CHOICES = {
    "latency-55": Aim("latency", 0.55), "latency-48": Aim("latency", 0.48), "latency-45": Aim("latency", 0.45),
    "flops-50": Aim("flops", 0.50), "flops-43": Aim("flops", 0.43),
    "stages-39": Aim("flops", 1 / 2.57, stages=(3, 2, 6), multiple=16),
    "gpu-55": Aim("latency", 0.55, "cuda", "fp16"), "gpu128-50": Aim("latency", 0.50, "cuda", "fp16", batch=128),
}  # fmt: skip


def main() -> None:
    """Writes the requested recipes; the latency table exists only during the run."""
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("data", type=Path)
    p.add_argument("names", nargs="*", help=f"of {', '.join(CHOICES)} (default: those of the backend)")
    p.add_argument("--backend", choices=("cpu", "cuda"), default="cpu")
    p.add_argument("--model", type=Path, help="the published network as ONNX (default: from its checkpoint, which PyTorch reads)")
    p.add_argument("--scores", type=Path, help="file with the importance (.npz): read if it exists, otherwise written")
    p.add_argument("--out", type=Path, default=Path(__file__).parent / "recipes")
    args = p.parse_args()
    names = args.names or [n for n in CHOICES if CHOICES[n].backend == args.backend]
    if unknown := set(names) - set(CHOICES):
        p.error(f"unknown choice {', '.join(sorted(unknown))}; available: {', '.join(CHOICES)}")
    args.out.mkdir(parents=True, exist_ok=True)
    net = whet.network_from_onnx(args.model) if args.model else model.load(args.data)
    inner = [g for g in groups(net) if g.name.endswith("conv1.weight") and g.name != "conv1.weight"]
    blocks = branches(net)
    scores = scored(net, args)
    began = time.perf_counter()
    for name in names:
        small, c, device = chosen(net, CHOICES[name], inner, blocks, scores)
        how = {k: v for k, v in asdict(CHOICES[name]).items() if v} | {"multiple": width_step(CHOICES[name]), "device": device}
        about = {"importance": "taylor2", "images": IMAGES, **how}
        save_recipe(make_pruning_recipe(net, c.kept, about=about, channel_groups=inner, removed=c.removed), args.out / f"{name}.json")
        print(f"{name}: FLOPs {count_flops(small) / count_flops(net):.3f}, {about['objective']} {c.before:.4g} -> {c.after:.4g} "
              f"({c.after / c.before:.3f}); {len(c.removed)} blocks removed; after {time.perf_counter() - began:.0f} s", flush=True)  # fmt: skip


def chosen(net: Network, how: Aim, inner: list[Group], blocks: list[Branch], scores: dict[str, np.ndarray]) -> tuple[Network, Choice, str]:
    """The cut network, the choice, and the machine on which layers were timed. Earlier times are read from the timing cache."""
    shape = {"x": (how.batch, 3, 32, 32)}
    config = BuildConfig(backend=how.backend, threads=1, precisions=() if how.precision == "fp32" else (how.precision,),
                         profiles=((shape, shape, shape),))  # fmt: skip
    if how.stages:
        return (*staged(net, how, inner, blocks, scores), "none: FLOPs are counted")
    base = lower_to_static_layers(net, config)
    with Meter(config, LatencyTable(), base) as meter:
        costs = make_latency_costs(net, inner, blocks, meter, base) if how.objective == "latency" else make_flop_costs(net, inner, blocks)
        c = choose_within(inner, blocks, scores, costs, how.share * costs.total({}), multiple=width_step(how))
        return cut(net, c.kept, inner, removed=c.removed), c, meter.device


def staged(net: Network, how: Aim, inner: list[Group], blocks: list[Branch], scores: dict[str, np.ndarray]) -> tuple[Network, Choice]:
    """Keeps the given number of blocks per stage, those with the largest terms (a first block with stride always stays), then selects channels."""
    gone = []
    for stage, count in enumerate(how.stages, 1):
        mine = sorted((b.name for b in blocks if b.name.startswith(f"/layer{stage}/")), key=lambda name: -float(scores[name].sum()))
        gone += mine[count - (model.BLOCKS - len(mine)) :]
    rest = remove_branches(net, gone)
    known = {g.name for g in inner}
    left = [g for g in groups(rest) if g.name in known]
    costs = make_flop_costs(rest, left, [])
    c = choose_within(left, [], scores, costs, how.share * count_flops(net), multiple=width_step(how))
    return cut(net, c.kept, inner, removed=gone), replace(c, removed=tuple(gone), before=float(count_flops(net)))


def width_step(how: Aim) -> int:
    """Widths are multiples of this."""
    return how.multiple or MULTIPLE[how.backend]


def scored(net: Network, args: argparse.Namespace) -> dict[str, np.ndarray]:
    """Importance of each channel and block, by group name."""
    if args.scores and args.scores.exists():
        with np.load(args.scores) as kept:
            return {name: kept[name] for name in kept.files}
    train = cifar.train_set(args.data, IMAGES)
    samples = Samples({"x": cifar.normalized(train.inputs["x"])}, train.labels)
    inner = [g for g in groups(net) if g.name.endswith("conv1.weight") and g.name != "conv1.weight"]
    scores = importance(inner, "taylor2", net=net, samples=samples, blocks=branches(net))
    if args.scores:
        np.savez(args.scores, **scores)
    return scores


if __name__ == "__main__":
    main()
