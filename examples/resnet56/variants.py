"""The pruned networks that are compared. All are cuts of one graph, and each has a recipe."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from whet.network import Network
from whet.pruning import branches, remove_branches
from whet.pruning.recipe import apply_recipe, load_recipe

#: Blocks in ascending order of the change of the outputs without them (KL divergence, 200 training images), from `sensitivity.py`.
LEAST: tuple[str, ...] = (
    "/layer2/layer2.8/Add",  # 0.067
    "/layer2/layer2.6/Add",  # 0.070
    "/layer2/layer2.5/Add",  # 0.095
    "/layer2/layer2.4/Add",  # 0.099
    "/layer1/layer1.5/Add",  # 0.108
    "/layer2/layer2.7/Add",  # 0.118
    "/layer2/layer2.1/Add",  # 0.125
    "/layer2/layer2.2/Add",  # 0.128
    "/layer3/layer3.6/Add",  # 0.149
    "/layer1/layer1.8/Add",  # 0.171
    "/layer3/layer3.8/Add",  # 0.172
    "/layer2/layer2.3/Add",  # 0.179
    "/layer3/layer3.3/Add",  # 0.215
    "/layer1/layer1.0/Add",  # 0.218
    "/layer3/layer3.1/Add",  # 0.221
    "/layer1/layer1.2/Add",  # 0.236
    "/layer3/layer3.5/Add",  # 0.263
    "/layer1/layer1.6/Add",  # 0.287
    "/layer1/layer1.4/Add",  # 0.291
    "/layer1/layer1.3/Add",  # 0.301
    "/layer3/layer3.7/Add",  # 0.308
    "/layer3/layer3.2/Add",  # 0.326
    "/layer3/layer3.4/Add",  # 0.451
    "/layer1/layer1.1/Add",  # 0.737
    "/layer1/layer1.7/Add",  # 1.488
)


@dataclass(frozen=True)
class Training:
    """Settings of a fine-tuning in addition to the common ones (tune.py)."""

    lr: float  # highest learning rate, at 256 images per step
    distill: float  # share of distillation in the loss
    teacher: str  # name of the teacher: OUT/NAME.tuned.onnx
    views: int = 0  # augmented forms of each image that are used alternately; the teacher runs once on each (0: new forms at every step)
    augment: str = "crop:4,flip"


SHORT, LONG = Training(0.05, 0.6, "teacher"), Training(0.1, 0.9, "teachers")
MORE = Training(0.1, 1.0, "teachers", views=64, augment="crop:4,flip,cutmix:50")  # continues from a LONG variant


@dataclass(frozen=True)
class Variant:
    """A network to fine-tune: `make` cuts the published one; `masks` are kept during training."""

    about: str
    make: Callable[[Network], Network] | None  # None: created by Torch-Pruning (rival.py)
    masks: str = ""
    training: Training = SHORT
    after: str = ""  # variant from whose fine-tuned weights training continues (`make` is not called)


def shorter(net: Network, count: int) -> Network:
    """Removes the `count` least important blocks."""
    known = {b.name for b in branches(net)}
    return remove_branches(net, [name for name in LEAST if name in known][:count])


RECIPES = Path(__file__).parent / "recipes"


def by_recipe(net: Network, name: str) -> Network:
    """The selection of choose.py: recipes/NAME.json."""
    return apply_recipe(net, load_recipe(RECIPES / f"{name}.json"))


VARIANTS: dict[str, Variant] = {
    "original": Variant("as published, fine-tuned the same way", lambda net: net),
    "depth": Variant("14 of 27 blocks taken out", lambda net: shorter(net, 14)),
    "latency-55": Variant("whet's choice for 55 % of the CPU's time: widths and blocks, by Taylor terms", partial(by_recipe, name="latency-55")),
    "latency-48": Variant("the same for 48 %", partial(by_recipe, name="latency-48")),
    "latency-45": Variant("the same for 45 %", partial(by_recipe, name="latency-45")),
    "flops-50": Variant("the same choice with half of the FLOPs as its aim", partial(by_recipe, name="flops-50")),
    "flops-43": Variant("the same with 43 % of the FLOPs", partial(by_recipe, name="flops-43")),
    "gpu-55": Variant("whet's choice for 55 % of the H200's time at batch 1 in FP16: whole blocks, 13 of them", partial(by_recipe, name="gpu-55")),
    "gpu128-50": Variant("the same for half of the time at batch 128: 14 blocks", partial(by_recipe, name="gpu128-50")),
    "original-long": Variant("as published, fine-tuned longer, by two teachers", lambda net: net, training=LONG),
    "stages-39": Variant("39 % of the FLOPs: 16 of 27 blocks out, tuned as original-long", partial(by_recipe, name="stages-39"), training=LONG),
    "stages-39-more": Variant("stages-39, trained on by its teachers with CutMix", lambda net: net, training=MORE, after="stages-39"),
    "original-more": Variant("original-long, trained on in the same way", lambda net: net, training=MORE, after="original-long"),
    "2:4": Variant("every weight 2:4 where its shape allows it", lambda net: net, masks="2:4"),
    "tp-magnitude-50": Variant("Torch-Pruning's MagnitudePruner, L2, the same share of each layer, half of the FLOPs", None),
    "tp-group-50": Variant("Torch-Pruning's GroupNormPruner, all layers together, half of the FLOPs", None),
    "tp-group-50-by8": Variant("the same, widths in multiples of eight", None),
}
