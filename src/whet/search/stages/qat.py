"""INT8 training of a survivor whose calibrated engine loses too much: short, from the calibrated ranges, on the layers built in INT8.

The builder selected the INT8 layers by measured time (the others stay in floating point), so training emulates only the engine's roundings.
The result is the network with Q/DQ nodes and trained ranges; the caller builds it and compares its score with the calibrated engine's.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from whet.builder import BuildConfig
from whet.builder.assemble import compute_model_digest
from whet.builder.lock.relock import read_recipe
from whet.builder.precision.comparison import list_identifying_names
from whet.builder.precision.int8 import prepare, quantize_network
from whet.engine.plan import EnginePlan
from whet.engine.report import QuantizationRecipe
from whet.network import Layer, Network
from whet.precision import Ranges
from whet.pruning.order import note
from whet.search.recipe.recipe import AutoRecipe
from whet.search.recipe.space import Candidate
from whet.search.stages.finetune import explain_missing_torch, make_step_callback, read_training_set, run_resumable
from whet.search.stages.prepare import Prepared, Say, has_zeros
from whet.search.stages.training_options import make_finetune_config, make_qat_settings

CHECKPOINT = "qat.safetensors"  # a killed job resumes from it
_SHARE = 0.5  # share of the allowed drop that calibration may lose without training
_WITHOUT_TARGET = 0.005  # the same as a share of the original's metric, if the target allows no drop or gives none


@dataclass(frozen=True)
class TrainedForInt8:
    """The trained network: `floating` without and `quantized` with Q/DQ nodes, and its `ranges`.

    `resumed_at` is the step of the checkpoint from which training resumed, 0 without one.
    """

    floating: Network
    quantized: Network
    ranges: Ranges
    resumed_at: int


def explain_skip(recipe: AutoRecipe, c: Candidate, plan: EnginePlan) -> str | None:
    """The reason why a survivor cannot be trained for INT8, or None."""
    if recipe.qat is None:
        return "the recipe says qat: never"
    if c.precision != "int8":
        return f"training emulates INT8 rounding only, not {c.precision.upper()}"
    if plan.report.quantized is None:
        return "INT8 was not faster: the engine computes in floating point"
    if not plan.report.quantized.ranges:
        return "INT8 was not faster: only the weights have 8 bits"
    if recipe.data.train is None:
        return "the recipe gives no data.train"
    return explain_missing_torch()


def decide_int8_training(qat: Mapping[str, Any], allowed: float | None, lost: float, drop: float, original: float) -> tuple[bool, str]:
    """Decides whether a calibrated engine is trained; returns the decision and its reason.

    `lost` is the loss by calibration, `drop` the total loss against the `original` metric, `allowed` the target's limit on `drop`.
    """
    limit = qat.get("threshold")
    if limit is None:
        limit = _SHARE * allowed if allowed else _WITHOUT_TARGET * abs(original)
    if qat["when"] == "always":
        return True, f"qat: always; calibration lost {lost:.3g}"
    if allowed is not None and drop > allowed and lost > 0:
        return True, f"total loss {drop:.3g} (at most {allowed:g}), {lost:.3g} of it by calibration"
    return lost > limit, f"calibration lost {lost:.3g}, {'more' if lost > limit else 'no more'} than {limit:.3g}"


def train_for_int8(
    pruned: Prepared, original: Network, roundings: QuantizationRecipe, config: BuildConfig, recipe: AutoRecipe, c: Candidate, folder: Path,
    *, say: Say,
) -> TrainedForInt8:  # fmt: skip
    """Trains `pruned.network` with the calibrated engine's `roundings` (its report's "quantized"): its ranges and INT8 layers.

    Resumes from a killed job's checkpoint. Raises TrainingError, CalibrationError.
    """
    from whet.training import train_quantization_aware

    assert recipe.qat is not None
    say("qat")
    calibrated = read_recipe(roundings)
    path = folder / CHECKPOINT
    masks = "zeros" if c.two_four and has_zeros(pruned.network) else ""
    settings = make_finetune_config(make_qat_settings(recipe.qat, recipe.finetune), checkpoint=str(path), masks=masks)
    data = read_training_set(recipe, original)

    def train() -> Any:
        return train_quantization_aware(
            pruned.network, data, settings, ranges=calibrated.ranges, skip=lambda x: _is_left_out(x, calibrated.float_layers),
            teacher=original,
            progress=make_step_callback(say, "qat")
        )  # fmt: skip

    trained = run_resumable(path, train, pruned.notes)
    tensors = {**calibrated.ranges.tensors, **trained.ranges.tensors}
    learned = dataclasses.replace(calibrated.ranges, model=compute_model_digest(trained.floating), tensors=tensors)
    quantized = quantize_network(prepare(trained.floating, config), dataclasses.replace(calibrated, ranges=learned))
    note(quantized, "calibrate", by="quantization-aware training", steps=trained.training.steps)
    return TrainedForInt8(trained.floating, quantized, learned, trained.training.resumed_at)


def _is_left_out(layer: Layer, skip: frozenset[str]) -> bool:
    return layer.name in skip or bool(skip & list_identifying_names(layer))
