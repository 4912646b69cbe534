"""Training for INT8 of a survivor whose calibrated engine loses too much: short, from the calibrated ranges, on the layers that pay in INT8.

The builder has said by the clock which layers compute in INT8 (the others stay in floating point), so nothing is trained for roundings that
the engine does not do. What comes out is the network with Q/DQ nodes and trained ranges; the caller builds and scores it beside the
calibrated one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from whet.builder import BuildConfig
from whet.builder.assemble import model_digest
from whet.builder.lock.relock import read_recipe
from whet.builder.precision.comparison import known_as
from whet.builder.precision.int8 import prepared, quantized_network
from whet.engine.plan import EnginePlan
from whet.engine.report import QuantizationRecipe
from whet.network import Layer, Network
from whet.precision import Ranges
from whet.pruning.order import note
from whet.search.recipe.recipe import AutoRecipe
from whet.search.recipe.space import Candidate
from whet.search.stages.finetune import going_on, no_torch, steps_of, training_set
from whet.search.stages.prepare import Prepared, Say
from whet.search.stages.training_options import as_config, qat_settings

CHECKPOINT = "qat.safetensors"  # what a killed job goes on from
_SHARE = 0.5  # of the drop that the target allows: what calibration may lose before training is worth its time
_WITHOUT_TARGET = 0.005  # of the original's metric, where the target allows no drop or says nothing of it


@dataclass(frozen=True)
class TrainedForInt8:
    """`floating` is the trained network, `quantized` the same with Q/DQ, `ranges` those of both kinds of layers.

    `resumed_at` is the step that a checkpoint of a killed job was at, 0 without one.
    """

    floating: Network
    quantized: Network
    ranges: Ranges
    resumed_at: int


def why_not(recipe: AutoRecipe, c: Candidate, plan: EnginePlan) -> str | None:
    """Why a survivor cannot be trained for INT8, or None."""
    if recipe.qat is None:
        return "the recipe says qat: never"
    if c.precision != "int8":
        return f"training emulates the roundings of INT8 alone, not those of {c.precision.upper()}"
    if plan.report.quantized is None:
        return "INT8 did not pay: the engine computes in floating point"
    if recipe.data.train is None:
        return "the recipe gives no data.train"
    return no_torch()


def loses_too_much(qat: Mapping[str, Any], allowed: float | None, lost: float, drop: float, original: float) -> tuple[bool, str]:
    """Whether a calibrated engine is to be trained, and why (or why not), in words.

    `lost` is what calibration cost, `drop` all that is lost against the `original` metric, `allowed` what the target permits of that.
    """
    limit = qat.get("threshold")
    if limit is None:
        limit = _SHARE * allowed if allowed else _WITHOUT_TARGET * abs(original)
    if qat["when"] == "always":
        return True, f"qat: always; calibration lost {lost:.3g}"
    if allowed is not None and drop > allowed and lost > 0:
        return True, f"in all {drop:.3g} were lost (at most {allowed:g}), {lost:.3g} of them by calibration"
    return lost > limit, f"calibration lost {lost:.3g}, {'more' if lost > limit else 'no more'} than {limit:.3g}"


def trained_for_int8(
    made: Prepared, original: Network, roundings: QuantizationRecipe, config: BuildConfig, recipe: AutoRecipe, c: Candidate, folder: Path, *, say: Say
) -> TrainedForInt8:  # fmt: skip
    """Trains `made.network` with the `roundings` of the engine that calibration gave (its report's "quantized"): its ranges, its layers in INT8.

    Goes on from the checkpoint that a killed job left. Raises TrainingError, CalibrationError.
    """
    from whet.training import quantization_aware

    assert recipe.qat is not None
    say("qat")
    ranges, skip, tables = read_recipe(roundings)
    path = folder / CHECKPOINT
    settings = as_config(qat_settings(recipe.qat, recipe.finetune), checkpoint=str(path), masks="2:4" if c.two_four else "")
    data = training_set(recipe, original)

    def train() -> Any:
        return quantization_aware(
            made.network, data, settings, ranges=ranges, skip=lambda x: _left_out(x, skip), teacher=original, progress=steps_of(say, "qat")
        )  # fmt: skip

    found = going_on(path, train, made.notes)
    learned = dataclasses.replace(ranges, model=model_digest(found.floating), tensors={**ranges.tensors, **found.ranges.tensors})
    quantized = quantized_network(prepared(found.floating, config), learned, skip, tables=tables)
    note(quantized, "calibrate", by="quantization-aware training", steps=found.training.steps)
    return TrainedForInt8(found.floating, quantized, learned, found.training.resumed_at)


def _left_out(layer: Layer, skip: frozenset[str]) -> bool:
    return layer.name in skip or bool(skip & known_as(layer))
