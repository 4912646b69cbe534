"""Chooses which channels and which blocks go: writes recipes/NAME.json, what variants.py cuts by.

    PYTHONPATH=src python examples/resnet56/choose.py DATA [NAME ...]      # on the machine the engines are for, when it is quiet; minutes

One importance (second-order Taylor terms of the loss on labelled training images), one knapsack over the inner channels of all blocks and
the blocks themselves, two kinds of aim: milliseconds measured here, or FLOPs. That is the comparison "latency against FLOPs as the
objective"; everything else is alike. The knapsack's price goes by the table of measured layer times (whet latency-table).
"""

from __future__ import annotations

import os

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import sys
from pathlib import Path

import data as cifar
import model

from whet.builder import BuildConfig
from whet.pruning import branches, count_flops, cut, groups, importance
from whet.pruning.costs import flop_costs
from whet.pruning.importance import Samples
from whet.pruning.knapsack import choose_within
from whet.pruning.latency_cost import latency_costs, static_layers
from whet.pruning.latency_table import LatencyTable
from whet.pruning.meter import Meter
from whet.pruning.recipe import recipe_of, save_recipe

IMAGES, MULTIPLE = 192, 4
#: Name -> (objective, share of it that stays)
CHOICES = {
    "latency-55": ("latency", 0.55), "latency-48": ("latency", 0.48), "latency-45": ("latency", 0.45),
    "flops-50": ("flops", 0.50), "flops-43": ("flops", 0.43),
}  # fmt: skip


def main() -> None:
    """Writes the recipes asked for; a table of layer times is kept beside them only while this runs."""
    folder, names = Path(sys.argv[1]), sys.argv[2:] or list(CHOICES)
    net = model.load(folder)
    inner = [g for g in groups(net) if g.name.endswith("conv1.weight") and g.name != "conv1.weight"]
    blocks = branches(net)
    train = cifar.train_set(folder, IMAGES)
    samples = Samples({"x": cifar.normalized(train.inputs["x"])}, train.labels)
    scores = importance(inner, "taylor2", net=net, samples=samples, blocks=blocks)
    shape = {"x": (1, 3, 32, 32)}
    config = BuildConfig(threads=1, profiles=((shape, shape, shape),))
    base = static_layers(net, config)
    with Meter(config, LatencyTable(), base) as meter:
        costs = {"latency": latency_costs(net, inner, blocks, meter, base), "flops": flop_costs(net, inner, blocks)}
        for name in names:
            objective, share = CHOICES[name]
            c = choose_within(inner, blocks, scores, costs[objective], share * costs[objective].total({}), multiple=MULTIPLE)
            about = {"importance": "taylor2", "images": IMAGES, "multiple": MULTIPLE, "objective": objective, "share": share}
            recipe = recipe_of(net, c.kept, about=about | {"device": meter.device}, found=inner, removed=c.removed)
            save_recipe(recipe, Path(__file__).parent / "recipes" / f"{name}.json")
            small = cut(net, c.kept, inner, removed=c.removed)
            left = count_flops(small) / count_flops(net)
            print(f"{name}: FLOPs {left:.3f}, {objective} {c.after / c.before:.3f} of the whole; {len(c.removed)} blocks go", flush=True)


if __name__ == "__main__":
    main()
