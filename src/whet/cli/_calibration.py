"""The calibration flags, and the choice of the builder for --int8, --fp8, --best and --accuracy."""

from __future__ import annotations

import dataclasses
from typing import Any

from whet.backends import capabilities_of
from whet.cli import _exec_values as values
from whet.errors import UsageError

FLAGS = ("calib", "calibData", "calibPreprocess", "calibMethod", "calibZeroPoints", "calibSteps")


def build_from(o: Any, net: Any, config: Any, progress: Any) -> Any:
    """Builds the plan of `net`, with calibration if INT8 or FP8 is permitted and the model has no Q/DQ nodes of its own.

    Raises UsageError for calibration flags that have no effect.
    """
    from whet.builder import build
    from whet.builder.precision.float8 import build_float8, is_float8_lock
    from whet.builder.precision.int8 import build_int8, is_explicit
    from whet.builder.precision.permissions import has_float8
    from whet.precision.budget import Budget

    given = [name for name in FLAGS if name in o]
    wants = [p for p in ("int8", "fp8", "best") if p in config.precisions]
    if config.precision_constraints != "none" and any(p == "int8" for _, p in (*config.layer_precisions, *config.layer_output_types)):
        wants = wants or ["int8"]  # a precision demanded for a layer is permitted
    budget = Budget.parse(o.get("accuracy")) if "accuracy" in o else None
    if given and not wants and budget is None:
        raise UsageError(f"--{given[0]} is for --int8, --fp8, --best or --accuracy, and none of them is given")
    if budget is not None and not config.precisions:
        raise UsageError("--accuracy bounds the accuracy loss of --fp16, --bf16, --int8 or --best, and none of them is given")
    if not (wants or budget):
        return build(net, config, progress=progress)
    if is_explicit(net):
        plan = build(net, config, progress=progress)
        for name in (*given, *(["accuracy"] if budget else [])):
            plan.report.notes.append(f"--{name} is not used: the model has Q/DQ nodes, which define its quantization")
        return plan
    if wants:
        from whet.pruning.order import check_order

        check_order(net, "calibrate", "insist" in o)
    calibration = _calibration(o, net)
    has_ranges = calibration.samples is not None or _has_cache(calibration)
    if wants == ["fp8"] or is_float8_lock(config):
        return build_float8(net, config, calibration, budget=budget, progress=progress)
    if wants == ["best"] and not has_ranges:
        plan = build(net, config, progress=progress) if budget is None else _build_float(net, config, calibration, budget, progress)
        plan.report.notes.append(
            "--best leaves INT8 out: without calibration there are no ranges. Give --calibData=DIR|FILE.npz|FILE.npy|"
            "python:MODULE:FUNCTION or --calib=CACHE."
        )
        return plan
    if not wants and budget is not None:
        return _build_float(net, config, calibration, budget, progress)
    int8_calibration = dataclasses.replace(calibration, steps=tuple(s for s in calibration.steps if s != "round"))  # FP8 only
    plan = build_int8(net, config, int8_calibration, budget=budget, progress=progress)
    permitted = "fp8" in wants or ("best" in wants and has_ranges)
    if permitted and not config.lock and capabilities_of(config.backend).executes and has_float8(config):
        return build_float8(net, config, calibration, budget=budget, other=plan, progress=progress)
    return plan


def _build_float(net: Any, config: Any, calibration: Any, budget: Any, progress: Any) -> Any:
    from whet.builder.precision.accuracy_budget import SAMPLES
    from whet.builder.precision.float16 import build_floats_within
    from whet.builder.precision.int8 import prepare
    from whet.precision.sensitivity import chosen_samples

    if calibration.samples is None and budget.metric is None:
        raise UsageError(f"--accuracy={budget.kind} compares outputs on data: give --calibData")
    samples = [] if calibration.samples is None else chosen_samples(calibration.samples(), SAMPLES)
    return build_floats_within(net, prepare(net, config), config, budget, samples, progress=progress)[0]


def _has_cache(calibration: Any) -> bool:
    import os

    return bool(calibration.cache) and os.path.exists(calibration.cache)


def _calibration(o: Any, net: Any) -> Any:
    from whet.builder.precision.int8 import Calibration
    from whet.precision import METHODS, Preprocessing, calibration_data

    method = values.one_of(o.get("calibMethod", "auto"), "calibMethod", ("auto", *METHODS))
    zero_points = values.one_of(o.get("calibZeroPoints", "on"), "calibZeroPoints", ("on", "off")) == "on"
    samples = None
    if "calibData" in o:
        preprocessing = Preprocessing.parse(o.get("calibPreprocess")) if "calibPreprocess" in o else None
        source = o.get("calibData")

        def samples() -> Any:
            return calibration_data(source, net, preprocessing)

    return Calibration(samples=samples, cache=o.get("calib") or None, method=method, zero_points=zero_points, steps=parse_steps(o.get("calibSteps")))


def parse_steps(text: str) -> tuple[str, ...]:
    """Parses `equalize,smooth,bias`, `round` (FP8 only), `all` (those of INT8) or `none` (the default). Raises UsageError."""
    from whet.precision.scaling import STEPS

    if text in ("", "none"):
        return ()
    chosen = STEPS if text == "all" else tuple(p for p in text.split(",") if p)
    for p in chosen:
        values.one_of(p, "calibSteps", (*STEPS, "round", "all", "none"))
    return chosen

