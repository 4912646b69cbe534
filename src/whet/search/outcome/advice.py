"""Early warnings of a search: targets that cannot be measured on this machine, steps that cannot run."""

from __future__ import annotations

import filecmp
from collections.abc import Mapping
from os.path import isfile
from typing import Any

from whet.search.jobs.device_locks import find_physical_gpu
from whet.search.recipe.recipe import AutoRecipe
from whet.search.stages.energy import Meter
from whet.search.stages.finetune import explain_missing_torch

_IMPLAUSIBLE = 20.0  # top-1 in per cent; an original below it usually has data that do not match the model


def advise_before_search(recipe: AutoRecipe, *, here: bool = True) -> list[str]:
    """Warnings on the recipe and this machine; `here`: trials run on it (not on a cluster)."""
    warnings = []
    if here and (recipe.target.energy is not None or recipe.target.net_energy is not None):
        meter = Meter(find_physical_gpu(recipe.device))
        if meter.read is None:
            warnings.append(f"the target asks for energy, which is {meter.about}: no engine can meet it on this machine")
    missing = explain_missing_torch()
    if here and recipe.data.train is not None and (recipe.finetune is not None or recipe.qat is not None) and missing is not None:
        warnings.append(f"data.train is given, but survivors will not be trained: {missing}")
    if recipe.data.judge is None and recipe.metric == "top1":
        warnings.append("no data.judge is given: the chosen engine is scored on the data used to choose it, which is optimistic")
    if recipe.metric != "top1" and (recipe.data.score or recipe.data.judge):
        warnings.append("data.score and data.judge are not read: the metric is a function with its own data (see its argument `which`)")
    for one, other in (("judge", "score"), ("train", "judge"), ("train", "score")):
        if _is_same_source(getattr(recipe.data, one), getattr(recipe.data, other)):
            warnings.append(f"data.{one} equals data.{other}: scores on samples used for training or selection are optimistic")
    return warnings


def _is_same_source(first: str | None, other: str | None) -> bool:
    """True if two sources are the same: equal text, or files with equal bytes."""
    if first is None or other is None:
        return False
    return first == other or (isfile(first) and isfile(other) and filecmp.cmp(first, other, shallow=False))


def advise_on_samples(recipe: AutoRecipe, count: int) -> list[str]:
    """Warns if `count` scored samples cannot resolve the drop that the target allows."""
    allowed = recipe.target.accuracy_drop
    if recipe.metric != "top1" or allowed is None or not count or 100 / count <= max(allowed, 1e-9):
        return []
    return [f"data.score has {count} samples, so one sample is {100 / count:.2g} points: a drop of {allowed:g} is below that resolution"]


def advise_on_original(recipe: AutoRecipe, result: Mapping[str, Any]) -> list[str]:
    """Warns if the original's score is implausibly low."""
    value = result["metric"]["value"]
    if recipe.metric != "top1" or value >= _IMPLAUSIBLE:
        return []
    return [
        f"the original scores {value:.3g} % on data.score: if it is known to score higher, the data do not match the model "
        "(data.preprocess, axis order, labels starting at 1, a subfolder missing for some class)"
    ]
