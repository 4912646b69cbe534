"""Sources of INT8 ranges: calibration data, a cache, or invented ones with a warning; and the steps that reduce quantization error."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from whet.builder.assemble import compute_model_digest
from whet.builder.batching.rebatch import match_batch
from whet.builder.config import BuildConfig
from whet.builder.verify.blas_threads import limit_blas_threads
from whet.builder.verify.device_values import RunsOfNetworks, select_runs
from whet.engine.report import CalibrationStep
from whet.network import Network
from whet.passes import Phase, run_passes, select
from whet.precision import Analysis, Ranges, calibrate, find_quantization_sites, read_cache, select_samples, write_cache
from whet.precision.calibrate import compute_content_digest
from whet.precision.concurrent import count_workers
from whet.precision.quantization_sites import is_never_negative
from whet.precision.ranges import Range
from whet.precision.scaling import apply_scalings
from whet.precision.sensitivity import RunOf
from whet.precision.steps import SAMPLES as STEP_SAMPLES
from whet.precision.steps import find_corrections, find_scalings

_LEAST_GAIN_DB = 0.3  # required gain at the outputs of a few samples, so that it holds on others
_LEAST_SAMPLES = 4
_INVENTED = 4.0  # largest magnitude of every tensor without calibration data, like trtexec


@dataclass(frozen=True)
class Calibration:
    """The source of ranges: a cache that exists, else samples (an iterable of inputs by name), else invented ranges.

    `cache` is written after calibrating. `method` and `forced` as in precision.calibrate; `steps` of precision.scaling.STEPS are tried
    and kept if they lower the error.
    """

    samples: Callable[[], Iterable[Mapping[str, np.ndarray]]] | None = None
    cache: str | None = None
    method: str = "auto"
    forced: tuple[tuple[str, str], ...] = ()
    zero_points: bool = True
    steps: tuple[str, ...] = ()


def is_explicit(net: Network) -> bool:
    """True for a network with its own Q/DQ nodes."""
    return any(x.op in ("QuantizeLinear", "DequantizeLinear") for x in net.layers)


def prepare(net: Network, config: BuildConfig) -> Network:
    """A copy of the source network after the passes up to the folding of weights: the input of calibration and Q/DQ insertion."""
    prepared = net.clone()
    run_passes(prepared, [p for p in select(config.optimization_level, config.passes) if p.phase <= Phase.FOLD])
    return prepared


def get_calibrated_ranges(
    net: Network,
    prepared: Network,
    calibration: Calibration,
    config: BuildConfig,
    note: Callable[[str], None],
    tried: list[CalibrationStep] | None = None,
    inform: Callable[[str], None] | None = None,
    run_of: RunOf | None = None,
) -> Ranges:
    """Ranges for `prepared` (from `prepare(net)`), from the cache, the samples, or invented with a warning.

    `note` receives warnings, `inform` findings. `run_of` makes the runs of networks (default: `select_calibration_runs`). The `calibration.steps`
    that were tried and kept are appended to `tried`.
    """
    model = compute_model_digest(net)
    if calibration.cache and os.path.exists(calibration.cache):
        return read_cache(calibration.cache, prepared, model)
    if calibration.samples is None:
        note(
            "INT8 without calibration: the ranges are INVENTED (as trtexec does), so times are real but outputs are meaningless. "
            "Give --calibData=DIR|FILE.npz|FILE.npy|python:MODULE:FUNCTION or --calib=CACHE."
        )
        return make_placeholder_ranges(prepared)
    steps = calibration.steps
    if steps and calibration.cache and not calibration.cache.endswith(".json"):
        note(f"{calibration.cache} is TensorRT's cache format, which holds only scales: {', '.join(steps)} are left out. Name a .json cache.")
        steps = ()
    prepared = match_batch(prepared, calibration.samples())
    run_of = run_of or select_calibration_runs(prepared, calibration, config, note)
    found = _compute_ranges(prepared, calibration, model, run_of)
    if steps:
        found, rows = _improve_ranges(prepared, found, calibration, model, steps, run_of, note, inform)
        if tried is not None:
            tried += rows
    if calibration.cache:
        write_cache(calibration.cache, found)
    return found


def select_calibration_runs(prepared: Network, calibration: Calibration, config: BuildConfig, note: Callable[[str], None]) -> RunsOfNetworks:
    """What computes the values of `prepared`, and of networks derived from it, for the calibration samples: the CPU, or the GPU of the build."""
    if calibration.samples is None:
        return select_runs(prepared, config, None, note)
    return select_runs(match_batch(prepared, calibration.samples()), config, next(iter(calibration.samples()), None), note)


def _compute_ranges(prepared: Network, calibration: Calibration, model: str, run_of: RunOf, left_out: frozenset[str] = frozenset()) -> Ranges:
    """Ranges from all samples but those with the digests `left_out`."""
    assert calibration.samples is not None
    samples = (f for f in calibration.samples() if not left_out or compute_content_digest(f) not in left_out)
    with limit_blas_threads(1):
        return calibrate(
            prepared, samples, run=run_of(prepared, find_quantization_sites(prepared).names()), method=calibration.method,
            forced=dict(calibration.forced), zero_points=calibration.zero_points, model=model, workers=count_workers(),
        )  # fmt: skip


def _improve_ranges(
    prepared: Network,
    plain: Ranges,
    calibration: Calibration,
    model: str,
    steps: tuple[str, ...],
    run_of: RunOf,
    note: Callable[[str], None],
    inform: Callable[[str], None] | None,
) -> tuple[Ranges, list[CalibrationStep]]:
    """The best of: no step; the kept scalings; either of them with the kept bias corrections. Judged at the network's outputs.

    A step that improves a layer may still degrade the network, and one fitted to the samples may saturate on others. Each kind must therefore
    raise the output SNR on held-out samples. The kept steps are then calibrated on all samples.
    """
    assert calibration.samples is not None
    count = sum(1 for _ in calibration.samples())
    if count < _LEAST_SAMPLES:
        note(f"Calibration steps ({', '.join(steps)}) are left out: {count} samples are too few for a held-out set")
        return plain, []
    judges = select_samples(calibration.samples(), min(STEP_SAMPLES, count // 2))
    unseen = frozenset(compute_content_digest(f) for f in judges)
    others = select_samples((f for f in calibration.samples() if compute_content_digest(f) not in unseen), STEP_SAMPLES)
    scalings, tried = find_scalings(
        prepared, (f for f in calibration.samples() if compute_content_digest(f) not in unseen), others, run_of, steps, calibration.zero_points
    )
    trial = _compute_ranges(prepared, calibration, model, run_of, unseen)
    options = [("none", trial)]
    if scalings:
        scaled = _compute_ranges(apply_scalings(prepared, scalings), calibration, model, run_of, unseen)
        options.append(("scaling", dataclasses.replace(scaled, scalings=scalings)))
    if "bias" in steps:
        for what, ranges in list(options):
            corrections, shifted = find_corrections(apply_scalings(prepared, ranges.scalings), ranges, others, run_of)
            if what == "none":
                tried.tried += shifted.tried
            if corrections:
                options.append(("bias" if what == "none" else f"{what} and bias", dataclasses.replace(ranges, corrections=corrections)))
    snrs = [Analysis(prepared, "int8", judges, run_of, ranges).snr() for _, ranges in options]
    best = max(range(len(options)), key=lambda i: (snrs[i] - (_LEAST_GAIN_DB if i else 0.0), -i))
    shown = ", ".join(f"{what} {snr:.1f} dB" for (what, _), snr in zip(options, snrs, strict=True))
    if inform is not None:
        inform(f"Calibration steps ({', '.join(steps)}): {tried.text()}. At the outputs, on other samples: {shown}; kept: {options[best][0]}.")
    chosen = options[best][1]
    kept = plain
    if chosen.scalings:
        kept = dataclasses.replace(_compute_ranges(apply_scalings(prepared, chosen.scalings), calibration, model, run_of), scalings=chosen.scalings)
    kept = dataclasses.replace(kept, corrections=chosen.corrections)
    used = {"bias": set(kept.corrections)}
    rows = [CalibrationStep(step, at, at in used.get(step, set(kept.scalings)), before, after) for step, at, before, after, _ in tried.tried]
    ends = [CalibrationStep(what, "outputs", i == best, snr_db=s) for i, ((what, _), s) in enumerate(zip(options, snrs, strict=True))]
    return kept, [*rows, *ends]


def make_placeholder_ranges(prepared: Network) -> Ranges:
    """The same range for every tensor: useful only for timing."""
    sites = find_quantization_sites(prepared)
    return Ranges({t.name: Range(0.0 if is_never_negative(t) else -_INVENTED, _INVENTED, "invented") for t in sites.roots})
