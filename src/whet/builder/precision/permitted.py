"""The build for the permitted precisions: floating point, INT8, FP8 or the fastest of them, with calibration and an accuracy budget."""

from __future__ import annotations

import dataclasses
import os

from whet.backends import get_capabilities
from whet.builder.build import build
from whet.builder.config import BuildConfig
from whet.builder.precision.accuracy_budget import SAMPLES
from whet.builder.precision.calibration import Calibration, is_explicit, prepare
from whet.builder.precision.float8 import build_float8, is_float8_lock
from whet.builder.precision.float16 import build_floats_within
from whet.builder.precision.int8 import build_int8
from whet.builder.precision.permissions import has_float8
from whet.builder.progress import Progress
from whet.engine.plan import EnginePlan
from whet.errors import UsageError
from whet.network import Network
from whet.precision.budget import Budget
from whet.precision.sensitivity import select_samples


def list_calibrated_precisions(config: BuildConfig) -> list[str]:
    """The permitted precisions that need ranges: "int8", "fp8", "best"."""
    wanted: list[str] = [p for p in ("int8", "fp8", "best") if p in config.precisions]
    demanded = any(p == "int8" for _, p in (*config.layer_precisions, *config.layer_output_types))
    if demanded and config.precision_constraints != "none":
        wanted = wanted or ["int8"]  # a precision demanded for a layer is permitted
    return wanted


def build_permitted(
    net: Network, config: BuildConfig, calibration: Calibration, *, budget: Budget | None = None, progress: Progress | None = None
) -> EnginePlan:
    """The fastest engine with the permitted precisions, within `budget`. A network with Q/DQ nodes is built as it is.

    Raises the errors of `build`, `build_int8` and `build_float8`, and UsageError for a budget on outputs without samples.
    """
    wanted = list_calibrated_precisions(config)
    if not (wanted or budget) or is_explicit(net):
        return build(net, config, progress=progress)
    has_ranges = calibration.samples is not None or (bool(calibration.cache) and os.path.exists(str(calibration.cache)))
    if wanted == ["fp8"] or is_float8_lock(config):
        return build_float8(net, config, calibration, budget=budget, progress=progress)
    if wanted == ["best"] and not has_ranges:
        plan = build(net, config, progress=progress) if budget is None else _build_floats(net, config, calibration, budget, progress)
        plan.report.notes.append(
            "--best leaves INT8 out: without calibration there are no ranges. Give --calibData=DIR|FILE.npz|FILE.npy|"
            "python:MODULE:FUNCTION or --calib=CACHE."
        )
        return plan
    if not wanted and budget is not None:
        return _build_floats(net, config, calibration, budget, progress)
    int8_calibration = dataclasses.replace(calibration, steps=tuple(s for s in calibration.steps if s != "round"))  # FP8 only
    plan = build_int8(net, config, int8_calibration, budget=budget, progress=progress)
    permitted = "fp8" in wanted or ("best" in wanted and has_ranges)
    if permitted and not config.lock and get_capabilities(config.backend).executes and has_float8(config):
        return build_float8(net, config, calibration, budget=budget, other=plan, progress=progress)
    return plan


def _build_floats(net: Network, config: BuildConfig, calibration: Calibration, budget: Budget, progress: Progress | None) -> EnginePlan:
    if calibration.samples is None and budget.metric is None:
        raise UsageError(f"--accuracy={budget.kind} compares outputs on data: give --calibData")
    samples = [] if calibration.samples is None else select_samples(calibration.samples(), SAMPLES)
    return build_floats_within(net, prepare(net, config), config, budget, samples, progress=progress)[0]
