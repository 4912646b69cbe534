"""Chooses which channels and which blocks go: writes recipes/NAME.json, what variants.py cuts by.

    python examples/resnet56/choose.py DATA [NAME ...]      # on the machine the engines are for, when it is quiet; minutes
    python examples/resnet56/choose.py DATA gpu-50 --backend cuda --precision fp16

One importance (second-order Taylor terms of the loss on labelled training images), one knapsack over the inner channels of all blocks and
the blocks themselves, two kinds of aim: milliseconds measured here, or FLOPs. That is the comparison "latency against FLOPs as the
objective"; everything else is alike. The knapsack's price goes by the table of measured layer times (whet latency-table).
"""

from __future__ import annotations

import os

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import argparse
import time
from pathlib import Path

import data as cifar
import model
import numpy as np

import whet
from whet.builder import BuildConfig
from whet.network import Network
from whet.pruning import branches, count_flops, cut, groups, importance
from whet.pruning.costs import flop_costs
from whet.pruning.importance import Samples
from whet.pruning.knapsack import choose_within
from whet.pruning.latency_cost import latency_costs, static_layers
from whet.pruning.latency_table import LatencyTable
from whet.pruning.meter import Meter
from whet.pruning.recipe import recipe_of, save_recipe

IMAGES, MULTIPLE = 192, {"cpu": 4, "cuda": 8}  # widths are multiples of this: the GPU's kernels read 16 bytes at a time
#: Name -> (objective, share of it that stays)
CHOICES = {
    "latency-55": ("latency", 0.55), "latency-48": ("latency", 0.48), "latency-45": ("latency", 0.45),
    "flops-50": ("flops", 0.50), "flops-43": ("flops", 0.43),
    "gpu-55": ("latency", 0.55), "gpu-50": ("latency", 0.50), "gpu-45": ("latency", 0.45),
}  # fmt: skip


def main() -> None:
    """Writes the recipes asked for; a table of layer times is kept only while this runs."""
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("data", type=Path)
    p.add_argument("names", nargs="*", help=f"of {', '.join(CHOICES)} (default: those of the backend)")
    p.add_argument("--backend", choices=("cpu", "cuda"), default="cpu")
    p.add_argument("--precision", default="fp32", help="that the layers are timed in")
    p.add_argument("--batch", type=int, default=1)
    p.add_argument("--model", type=Path, help="the published network as ONNX (default: from its checkpoint, which PyTorch reads)")
    p.add_argument("--scores", type=Path, help="the importance (.npz): read where the file is, else written")
    p.add_argument("--out", type=Path, default=Path(__file__).parent / "recipes")
    args = p.parse_args()
    names = args.names or [n for n in CHOICES if n.startswith("gpu-") == (args.backend == "cuda")]
    if unknown := set(names) - set(CHOICES):
        p.error(f"there is no choice {', '.join(sorted(unknown))}; there are {', '.join(CHOICES)}")
    args.out.mkdir(parents=True, exist_ok=True)
    net = whet.network_from_onnx(args.model) if args.model else model.load(args.data)
    inner = [g for g in groups(net) if g.name.endswith("conv1.weight") and g.name != "conv1.weight"]
    blocks = branches(net)
    scores = scored(net, args)
    shape = {"x": (args.batch, 3, 32, 32)}
    config = BuildConfig(backend=args.backend, threads=1, precisions=() if args.precision == "fp32" else (args.precision,),
                         profiles=((shape, shape, shape),))  # fmt: skip
    base = static_layers(net, config)
    began = time.perf_counter()
    with Meter(config, LatencyTable(), base) as meter:
        costs = {"latency": latency_costs(net, inner, blocks, meter, base), "flops": flop_costs(net, inner, blocks)}
        for name in names:
            objective, share = CHOICES[name]
            multiple = MULTIPLE[args.backend]
            c = choose_within(inner, blocks, scores, costs[objective], share * costs[objective].total({}), multiple=multiple)
            about = {"importance": "taylor2", "images": IMAGES, "multiple": multiple, "objective": objective, "share": share}
            about |= {"device": meter.device, "precision": args.precision, "batch": args.batch}
            save_recipe(recipe_of(net, c.kept, about=about, found=inner, removed=c.removed), args.out / f"{name}.json")
            small = cut(net, c.kept, inner, removed=c.removed)
            left = count_flops(small) / count_flops(net)
            print(f"{name}: FLOPs {left:.3f}, {objective} {c.before:.4g} -> {c.after:.4g} ({c.after / c.before:.3f}); {len(c.removed)} blocks go; "
                  f"after {time.perf_counter() - began:.0f} s", flush=True)  # fmt: skip


def scored(net: Network, args: argparse.Namespace) -> dict[str, np.ndarray]:
    """The importance of each channel and block, by the name of its group."""
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
