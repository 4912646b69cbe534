"""Fine-tuning of a survivor with labels, where the recipe gives some and PyTorch is installed; kept only if it scores better."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from time import perf_counter
from typing import Any

from whet.network import Network
from whet.pruning import count_params
from whet.search.prepare import Prepared, Rate, Say, flops_of
from whet.search.recipe import AutoRecipe
from whet.search.space import Candidate

CHECKPOINT = "finetune.safetensors"  # what a killed job goes on from


def fine_tuned(made: Prepared, original: Network, recipe: AutoRecipe, c: Candidate, folder: Path, *, say: Say, rate: Rate) -> None:
    """Trains `made.network` on data.train, the original as its teacher, or notes why not. Raises TrainingError, UsageError."""
    why = _why_not(recipe, c)
    if why is not None:
        made.notes.append(f"not fine-tuned: {why}")
        return
    from whet.precision import Preprocessing
    from whet.training import FinetuneConfig, finetune, training_data

    assert recipe.data.train is not None
    assert recipe.finetune is not None
    start = perf_counter()
    say("tuning")
    prepare = Preprocessing.parse(recipe.data.preprocess) if recipe.data.preprocess else None
    data = training_data(recipe.data.train, original, prepare)
    settings: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in recipe.finetune.items()}
    config = FinetuneConfig(**settings, checkpoint=str(folder / CHECKPOINT), masks="2:4" if c.two_four else "")
    told = [perf_counter()]

    def tell(done: int, total: int, what: str) -> None:
        if perf_counter() - told[0] > 0.5:
            told[0] = perf_counter()
            say(f"tuning {done}/{total}")

    result = finetune(made.network, data, config, teacher=original if config.distill > 0 else None, progress=tell)
    (folder / CHECKPOINT).unlink(missing_ok=True)
    before, after = made.steps[-1]["metric"], rate(result.network)
    better = after["value"] >= before["value"] if recipe.higher_is_better else after["value"] <= before["value"]
    row = {"params": count_params(result.network), "flops": flops_of(result.network), "seconds": perf_counter() - start, "metric": after}
    made.steps.append({"step": "fine-tuned with labels" + ("" if better else " (worse, not used)"), **row})
    if better:
        made.network = result.network


def _why_not(recipe: AutoRecipe, c: Candidate) -> str | None:
    if recipe.finetune is None:
        return "the recipe says finetune: false"
    if recipe.data.train is None:
        return "the recipe gives no data.train"
    if not (c.pruned or c.two_four):
        return "nothing was cut"
    if find_spec("torch") is None:
        return "PyTorch is not installed (pip install 'whet[train]')"
    return None
