"""Per-layer sensitivity to low precision and time saved: the analysis of `whet debug precision`, also for scripts."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from whet.builder.batching.rebatch import match_batch
from whet.builder.build import build
from whet.builder.config import BuildConfig
from whet.builder.precision.accuracy_budget import get_cache_file
from whet.builder.precision.comparison import compare_layer_times, list_identifying_names
from whet.builder.precision.float8_ranges import insert_float8
from whet.builder.precision.int8 import Calibration, get_calibrated_ranges, prepare
from whet.builder.precision.permissions import has_float8
from whet.builder.progress import Progress, Silent
from whet.builder.verify.segments import SegmentedRuns
from whet.engine.plan import EnginePlan
from whet.network import Layer, Network
from whet.precision import Analysis, LayerSensitivity, Ranges, emulate_network, select_samples
from whet.precision.concurrent import count_workers


@dataclass
class SensitivityReport:
    """Rows in order of sensitivity, descending; the outputs' SNR with all layers in low precision; the times of both engines in ms."""

    precision: str
    rows: list[LayerSensitivity]
    all_db: float
    samples: int
    tensors: dict[str, float] = field(default_factory=dict)
    float_ms: float | None = None
    low_ms: float | None = None
    notes: list[str] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        rows = [{**dataclasses.asdict(r), "saved_ms": r.saved_ms} for r in self.rows]
        return {**dataclasses.asdict(self), "rows": rows}


def analyze_sensitivity(
    net: Network,
    precision: str,
    calibration: Calibration,
    config: BuildConfig,
    *,
    samples: int = 8,
    times: bool = True,
    progress: Progress | None = None,
) -> SensitivityReport:
    """Ranks the layers of `net` by the output error of each layer alone in `precision` (int8, fp8, fp16, bf16).

    The errors are measured on the `samples` calibration samples with the smallest digests. With `times`, engines in FP32 and in the low
    precision (int8; fp16 and bf16 if the device computes in them) are built and the layers' times recorded. Raises CalibrationError without data.
    """
    log = progress or Silent()
    notes: list[str] = []
    prepared = prepare(net, config)
    ranges = None
    if precision in ("int8", "fp8"):
        wanted = calibration if precision == "int8" or calibration.method != "auto" else dataclasses.replace(calibration, method="minmax")
        ranges = get_calibrated_ranges(net, prepared, wanted, config, notes.append)
    chosen = [] if calibration.samples is None else select_samples(calibration.samples(), samples)
    if not chosen:
        chosen = _draw_inputs(net, samples)
        notes.append("There is no calibration data: the layers are judged on random values, which is not representative. Give --calibData.")
    judged = match_batch(prepared, chosen)
    analysis = Analysis(judged, precision, chosen, SegmentedRuns(judged, chosen), ranges, get_cache_file(judged, precision, config), count_workers())
    log.stage(f"each layer alone in {precision}", len(analysis.layers))
    rows = analysis.rank_layers(tell=log.step)
    log.stage("cumulative sensitivity", len(rows))
    analysis.set_cumulative_snr(rows, tell=log.step)
    report = SensitivityReport(precision, rows, analysis.snr(), len(chosen), analysis.tensors(), notes=notes)
    by = {x.name: x for x in analysis.layers}
    for r in rows:
        r.tensor_db = report.tensors.get(by[r.layer].outputs[0].name)
    if times:
        _set_times(report, net, prepared, ranges, analysis.layers, config, log)
    return report


def _draw_inputs(net: Network, count: int) -> list[dict[str, np.ndarray]]:
    """Seeded normal values in the inputs' shapes; dynamic dimensions are 1."""
    rng = np.random.default_rng(0)

    def draw_input(t: Any) -> np.ndarray:
        shape = tuple(d if isinstance(d, int) else 1 for d in t.shape)
        return np.asarray(rng.standard_normal(shape) if t.dtype.is_float else rng.integers(0, 2, shape)).astype(t.dtype.numpy)

    return [{t.name: draw_input(t) for t in net.inputs} for _ in range(count)]


def _set_times(
    report: SensitivityReport, net: Network, prepared: Network, ranges: Ranges | None, layers: list[Layer], config: BuildConfig, log: Progress
) -> None:
    """Sets the rows' times from an FP32 engine and one in the low precision."""
    if report.precision == "fp8" and not has_float8(config):
        report.notes.append("No times: this backend has no FP8 kernels, the sensitivity is emulated")
        return
    plain = dataclasses.replace(config, precisions=())
    if report.precision == "fp8":
        assert ranges is not None
        low = build(insert_float8(prepared, ranges), dataclasses.replace(config, precisions=("fp8",)), progress=log)
    elif report.precision == "int8":
        low = build(emulate_network(prepared, "int8", ranges), dataclasses.replace(config, precisions=("int8",)), progress=log)
    else:
        low = build(net, dataclasses.replace(config, precisions=(report.precision,)), progress=log)
    floats = build(net, plain, progress=log)
    if report.precision in ("int8", "fp8"):
        found: Mapping[str, tuple[float, float]] = compare_layer_times(floats, low, layers)
    else:
        found = _match_layer_times(floats, low, layers)
    for r in report.rows:
        if r.layer in found:
            r.float_ms, r.low_ms = found[r.layer]
    report.float_ms, report.low_ms = _get_engine_ms(floats), _get_engine_ms(low)
    if not found:
        report.notes.append("No layer times: nothing was timed, or no kernel of this device computes in this precision")


def _match_layer_times(floats: EnginePlan, low: EnginePlan, layers: Iterable[Layer]) -> dict[str, tuple[float, float]]:
    """Times of the engine layers that contain a source layer; a fused layer counts for the first of its source layers."""
    found: dict[str, tuple[float, float]] = {}
    taken: set[str] = set()
    before, after = (dict(p.report.layer_ms) for p in (floats, low))
    for layer in layers:
        own = list_identifying_names(layer)
        a = [x.name for x in floats.network.layers if own & list_identifying_names(x) and x.name in before]
        b = [x.name for x in low.network.layers if own & list_identifying_names(x) and x.name in after]
        if a and b and not taken & set(a):
            taken.update(a)
            found[layer.name] = sum(before[n] for n in a), sum(after[n] for n in b)
    return found


def _get_engine_ms(plan: EnginePlan) -> float | None:
    """An engine's measured latency, or the sum of its layers' times."""
    known = plan.report.latency_ms
    times = plan.report.layer_ms
    return float(known) if known is not None else float(sum(times.values())) if times else None


