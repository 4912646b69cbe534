"""The calibration flags, and the choice of the builder for --int8, --fp8, --best and --accuracy."""

from __future__ import annotations

from typing import Any

from whet.cli import _exec_values as values
from whet.errors import UsageError

FLAGS = ("calib", "calibData", "calibPreprocess", "calibMethod", "calibZeroPoints", "calibSteps")


def build_from(o: Any, net: Any, config: Any, progress: Any) -> Any:
    """Builds the plan of `net`, with calibration if INT8 or FP8 is permitted and the model has no Q/DQ nodes of its own.

    Raises UsageError for calibration flags that have no effect.
    """
    from whet.builder.precision.calibration import is_explicit
    from whet.builder.precision.permitted import build_permitted, list_calibrated_precisions
    from whet.precision.budget import Budget

    given = [name for name in FLAGS if name in o]
    wants = list_calibrated_precisions(config)
    budget = Budget.parse(o.get("accuracy")) if "accuracy" in o else None
    if given and not wants and budget is None:
        raise UsageError(f"--{given[0]} is for --int8, --fp8, --best or --accuracy, and none of them is given")
    if budget is not None and not config.precisions:
        raise UsageError("--accuracy bounds the accuracy loss of --fp16, --bf16, --int8 or --best, and none of them is given")
    explicit = is_explicit(net)
    if wants and not explicit:
        from whet.pruning.order import check_order

        check_order(net, "calibrate", "insist" in o)
    plan = build_permitted(net, config, _make_calibration(o, net), budget=budget, progress=progress)
    if explicit and (wants or budget):
        for name in (*given, *(["accuracy"] if budget else [])):
            plan.report.notes.append(f"--{name} is not used: the model has Q/DQ nodes, which define its quantization")
    return plan


def _make_calibration(o: Any, net: Any) -> Any:
    from whet.builder.precision.calibration import Calibration
    from whet.precision import METHODS, Preprocessing, calibration_data

    method = values.parse_choice(o.get("calibMethod", "auto"), "calibMethod", ("auto", *METHODS))
    zero_points = values.parse_choice(o.get("calibZeroPoints", "on"), "calibZeroPoints", ("on", "off")) == "on"
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
        values.parse_choice(p, "calibSteps", (*STEPS, "round", "all", "none"))
    return chosen

