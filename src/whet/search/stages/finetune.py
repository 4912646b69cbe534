"""Supervised fine-tuning of a survivor, if the recipe has data.train and PyTorch is installed; kept only if it scores better."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any, TypeVar

from whet.errors import TrainingError
from whet.network import Network
from whet.pruning import count_params
from whet.search.recipe.data import load_labelled
from whet.search.recipe.recipe import AutoRecipe
from whet.search.recipe.space import Candidate
from whet.search.stages.prepare import Prepared, Rate, Say, count_static_flops, has_zeros
from whet.search.stages.training_options import make_finetune_config

if TYPE_CHECKING:
    from whet.training import Finetuned

T = TypeVar("T")
CHECKPOINT = "finetune.safetensors"  # a killed job resumes from it
FINETUNED = "fine-tuned with labels"  # the step's name if its result is kept


def fine_tune(prepared: Prepared, original: Network, recipe: AutoRecipe, c: Candidate, folder: Path, *, say: Say, rate: Rate) -> None:
    """Trains `prepared.network` on data.train with the original as teacher, or notes the reason why not. Raises TrainingError, UsageError."""
    why = _explain_skip(recipe, c)
    if why is not None:
        prepared.notes.append(f"not fine-tuned: {why}")
        return
    start = perf_counter()
    result = train_network(prepared.network, original, recipe, c, folder, say=say, notes=prepared.notes)
    before, after = prepared.metric, rate(result.network)
    smaller = count_params(result.network) < count_params(prepared.network)  # gradual pruning: another trade-off, which the search compares
    used = smaller or not is_better(before["value"], after["value"], recipe)
    row = {"params": count_params(result.network), "flops": count_static_flops(result.network), "seconds": perf_counter() - start, "metric": after}
    if used and smaller:
        prepared.variants[len(prepared.steps)] = result.network
    prepared.steps.append({"step": FINETUNED + ("" if used else " (worse, not used)"), "used": used, **row})
    if used:
        prepared.network = result.network


def train_network(
    net: Network, original: Network, recipe: AutoRecipe, c: Candidate, folder: Path, *, say: Say, notes: list[str]
) -> Finetuned:
    """Trains `net` with `recipe.finetune`; resumes from a killed job's checkpoint in `folder`. Raises TrainingError, UsageError."""
    from whet.training import finetune

    assert recipe.finetune is not None
    path = folder / CHECKPOINT
    say("tuning")
    data = read_training_set(recipe, original)
    masks = "zeros" if c.two_four and has_zeros(net) else ""
    settings = recipe.finetune
    if masks and settings.get("prune_to"):
        settings = {**settings, "prune_to": ""}
        notes.append("not pruned during the training: cuts would break the 2:4 pattern")
    config = make_finetune_config(settings, checkpoint=str(path), masks=masks)
    teacher = original if config.distill > 0 else None
    return run_resumable(path, lambda: finetune(net, data, config, teacher=teacher, progress=make_step_callback(say, "tuning")), notes)


def read_training_set(recipe: AutoRecipe, net: Network) -> Any:
    """data.train in the form of whet.training; CSV files of images are read here."""
    from whet.precision import Preprocessing
    from whet.training import TrainingData, read_training_data

    assert recipe.data.train is not None
    if recipe.data.train.lower().endswith(".csv"):
        dataset = load_labelled(recipe.data.train, net, "data.train", recipe.data.preprocess)
        return TrainingData(dataset.inputs, dataset.labels)
    prepare = Preprocessing.parse(recipe.data.preprocess) if recipe.data.preprocess else None
    return read_training_data(recipe.data.train, net, prepare)


def is_better(a: float, b: float, recipe: AutoRecipe) -> bool:
    """True if the metric `a` is strictly better than `b`."""
    return a > b if recipe.higher_is_better else a < b


def make_step_callback(say: Say, kind: str) -> Callable[[int, int, str], None]:
    """A callback that reports training progress as the stage of the job."""
    told = [perf_counter()]

    def tell(done: int, total: int, description: str) -> None:
        if perf_counter() - told[0] > 0.5:
            told[0] = perf_counter()
            say(f"{kind} {done}/{total}")

    return tell


def run_resumable(checkpoint: Path, train: Callable[[], T], notes: list[str]) -> T:
    """Runs `train`, which resumes from an existing checkpoint; a mismatched checkpoint is deleted with a note.

    The checkpoint is kept after training, so that a job killed later does not train again; child.py removes it when the job is done.
    """
    there = checkpoint.exists()
    try:
        return train()
    except TrainingError as e:
        if not there:
            raise
        checkpoint.unlink(missing_ok=True)
        notes.append(f"training restarted: {e}")
        return train()


def _explain_skip(recipe: AutoRecipe, c: Candidate) -> str | None:
    if recipe.finetune is None:
        return "the recipe says finetune: false"
    if recipe.data.train is None:
        return "the recipe gives no data.train"
    if not (c.pruned or c.two_four or recipe.finetune.get("prune_to")):
        return "nothing was cut"
    return explain_missing_torch()


def explain_missing_torch() -> str | None:
    """The reason why training is impossible on this machine, or None."""
    return None if find_spec("torch") is not None else "PyTorch is not installed (pip install 'whet[train]')"
