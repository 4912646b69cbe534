"""What --int8 and --best do with a floating-point model: the calibration flags, and which of the two ways of building is taken."""

from __future__ import annotations

from typing import Any

from whet.cli import _exec_values as values
from whet.errors import UsageError

FLAGS = ("calib", "calibData", "calibPreprocess", "calibMethod", "calibZeroPoints")


def build_from(o: Any, net: Any, config: Any, progress: Any) -> Any:
    """The plan of `net`: with calibration where INT8 is permitted and the model does not say itself where it is quantized.

    Raises UsageError for calibration flags that have nothing to do.
    """
    from whet.builder import build
    from whet.builder.quantized import build_int8, is_explicit

    given = [name for name in FLAGS if name in o]
    wants = [p for p in ("int8", "best") if p in config.precisions]
    if given and not wants:
        raise UsageError(f"--{given[0]} is for --int8 (or --best), which is not given")
    if not wants or config.backend == "cuda":
        return build(net, config, progress=progress)
    if is_explicit(net):
        plan = build(net, config, progress=progress)
        if given:
            plan.report["notes"].append(f"--{given[0]} is not used: the model has Q/DQ nodes, which say where and how it is quantized")
        return plan
    calibration = _calibration(o, net)
    if wants == ["best"] and calibration.samples is None and not _has_cache(calibration):
        plan = build(net, config, progress=progress)
        plan.report["notes"].append(
            "--best leaves INT8 out: without calibration its numbers would mean nothing. Give --calibData=DIR|FILE.npz|FILE.npy|"
            "python:MODULE:FUNCTION or --calib=CACHE."
        )
        return plan
    return build_int8(net, config, calibration, progress=progress)


def _has_cache(calibration: Any) -> bool:
    import os

    return bool(calibration.cache) and os.path.exists(calibration.cache)


def _calibration(o: Any, net: Any) -> Any:
    from whet.builder.quantized import Calibration
    from whet.precision import METHODS, Preprocessing, calibration_data

    method = values.one_of(o.get("calibMethod", "auto"), "calibMethod", ("auto", *METHODS))
    zero_points = values.one_of(o.get("calibZeroPoints", "on"), "calibZeroPoints", ("on", "off")) == "on"
    samples = None
    if "calibData" in o:
        preprocessing = Preprocessing.parse(o.get("calibPreprocess")) if "calibPreprocess" in o else None
        source = o.get("calibData")

        def samples() -> Any:
            return calibration_data(source, net, preprocessing)

    return Calibration(samples=samples, cache=o.get("calib") or None, method=method, zero_points=zero_points)

