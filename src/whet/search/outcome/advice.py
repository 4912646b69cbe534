"""What a user should know before a search has run for twenty minutes: targets that nothing here can measure, steps that cannot be taken."""

from __future__ import annotations

import filecmp
from collections.abc import Mapping
from os.path import isfile
from typing import Any

from whet.search.jobs.device_locks import physical_gpu
from whet.search.recipe.recipe import AutoRecipe
from whet.search.stages.energy import Meter
from whet.search.stages.finetune import no_torch

_IMPLAUSIBLE = 20.0  # per cent that an original hardly ever stays below unless its data do not fit


def before(recipe: AutoRecipe, *, here: bool = True) -> list[str]:
    """Sentences on the recipe and this machine; `here`: the trials run on it (not on a cluster)."""
    said = []
    if here and (recipe.target.energy is not None or recipe.target.net_energy is not None):
        meter = Meter(physical_gpu(recipe.device))
        if meter.read is None:
            said.append(f"the target asks for energy, which is {meter.about}: no engine can meet it here")
    missing = no_torch()
    if here and recipe.data.train is not None and (recipe.finetune is not None or recipe.qat is not None) and missing is not None:
        said.append(f"data.train is given, but survivors will not be trained: {missing}")
    if recipe.data.judge is None and recipe.metric == "top1":
        said.append("no data.judge is given: the chosen engine will be judged on the data that it was chosen by, which flatters it")
    if recipe.metric != "top1" and (recipe.data.score or recipe.data.judge):
        said.append("data.score and data.judge are not read: the metric is a function, which has data of its own (`which` says for what)")
    for one, other in (("judge", "score"), ("train", "judge"), ("train", "score")):
        if _same(getattr(recipe.data, one), getattr(recipe.data, other)):
            said.append(f"data.{one} is what data.{other} is: what is measured on samples that were learned from or chosen by flatters the engine")
    return said


def _same(one: str | None, other: str | None) -> bool:
    """Whether two sources are one: the same text, or files of the same bytes."""
    if one is None or other is None:
        return False
    return one == other or (isfile(one) and isfile(other) and filecmp.cmp(one, other, shallow=False))


def on_samples(recipe: AutoRecipe, count: int) -> list[str]:
    """On how finely `count` scored samples tell the drop that the target allows."""
    allowed = recipe.target.accuracy_drop
    if recipe.metric != "top1" or allowed is None or not count or 100 / count <= max(allowed, 1e-9):
        return []
    return [f"data.score has {count} samples, so one of them is {100 / count:.2g} points: a drop of {allowed:g} cannot be told from none"]


def on_original(recipe: AutoRecipe, result: Mapping[str, Any]) -> list[str]:
    """On an original that scores next to nothing."""
    value = result["metric"]["value"]
    if recipe.metric != "top1" or value >= _IMPLAUSIBLE:
        return []
    return [
        f"the original itself scores {value:.3g} % on data.score: if it is known to do better, the data do not fit the model "
        "(data.preprocess, the order of the axes, labels that count from 1, subfolders that are not all the classes)"
    ]
