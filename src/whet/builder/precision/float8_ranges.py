"""Calibration for FP8 (e4m3): ranges, bias corrections, residual additions and layers that stay in floating point.

Without an accuracy budget the outputs still have to stay well above FP8's noise, judged in emulation on calibration samples. Below ENOUGH_DB
residual additions stay in 16 bits (all products remain in FP8); below LEAST_DB the most sensitive layers stay in floating point too.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from whet.builder.batching.rebatch import match_batch
from whet.builder.config import BuildConfig
from whet.builder.precision.accuracy_budget import Judge
from whet.builder.precision.calibration import Calibration, get_calibrated_ranges, select_calibration_runs
from whet.builder.precision.comparison import list_identifying_names
from whet.builder.progress import Progress
from whet.network import Network
from whet.precision import Analysis, Ranges, find_quantization_sites, quantize, select_samples
from whet.precision.budget import Budget
from whet.precision.calibrate import compute_content_digest
from whet.precision.concurrent import count_workers
from whet.precision.float8 import correct_biases, list_excluded_layers, round_weights_adaptively, skip_sums
from whet.precision.sensitivity import RunOf

ENOUGH_DB = 30.0  # output SNR in FP8 on calibration samples; docs/design/precision.md has the effect of lower values
LEAST_DB = 28.0
_JUDGES = 16  # samples for judging FP8 alternatives
_LEAST_SAMPLES = 2 * _JUDGES
_LEAST_GAIN_DB = 0.3


def insert_float8(prepared: Network, ranges: Ranges, skip: Mapping[str, str] | frozenset[str] = frozenset()) -> Network:
    """Inserts e4m3 Q/DQ into a prepared network, except around the layers of kept_out and `skip`."""
    left = {*list_excluded_layers(prepared), *skip}
    return quantize(prepared, ranges, skip=lambda x: x.name in left or bool(left & list_identifying_names(x)), kind="fp8")


def calibrate_float8_ranges(
    net: Network, prepared: Network, calibration: Calibration, config: BuildConfig, notes: list[str], info: list[str] | None = None,
    enough_db: float = ENOUGH_DB, run_of: RunOf | None = None,
) -> Ranges:  # fmt: skip
    """FP8 ranges with bias corrections from calibration data. Residual additions stay in floating point if the outputs would otherwise have less
    than `enough_db`; the step "round" adds weights rounded against their layers' errors, if that raises the outputs' SNR. `run_of` as in
    get_calibrated_ranges."""
    method = "minmax" if calibration.method == "auto" else calibration.method
    plain = dataclasses.replace(calibration, method=method, steps=())
    run_of = run_of or select_calibration_runs(prepared, calibration, config, notes.append)
    ranges = get_calibrated_ranges(net, prepared, plain, config, notes.append, run_of=run_of)
    samples = calibration.samples
    if samples is None:
        if not ranges.corrections:
            notes.append("FP8 without calibration data has no corrections of biases: it loses more than it must. Give --calibData.")
        return ranges
    prepared = match_batch(prepared, samples())
    left = list_excluded_layers(prepared)
    heard = notes if info is None else info
    corrected = correct_biases(prepared, ranges, samples(), run_of, left)
    plain_ranges = _with_sums(prepared, corrected, calibration, left, heard, enough_db, run_of)
    ranges = dataclasses.replace(ranges, float_sums=plain_ranges.float_sums)
    if "round" not in calibration.steps or sum(1 for _ in samples()) < _LEAST_SAMPLES:
        return plain_ranges
    # Judged on samples that were not used to round the weights.
    judges = select_samples(samples(), _JUDGES)
    unseen = {compute_content_digest(f) for f in judges}

    def list_other_samples() -> Iterator[Mapping[str, np.ndarray]]:
        return (f for f in samples() if compute_content_digest(f) not in unseen)

    careful = dataclasses.replace(ranges, rounded=round_weights_adaptively(prepared, ranges, list_other_samples(), run_of, left))
    if not careful.rounded:
        return plain_ranges
    careful = correct_biases(prepared, careful, list_other_samples(), run_of, left)
    names = [x.name for x in find_quantization_sites(prepared, left).layers]
    near, far = _compare_ranges(prepared, judges, names, plain_ranges, lambda _: careful, run_of)
    kept = far >= near + _LEAST_GAIN_DB
    said = "kept" if kept else "not kept"
    heard.append(f"FP8 weights rounded against their layers' errors: {near:.1f} dB to {far:.1f} at the outputs, on other samples; {said}.")
    return careful if kept else plain_ranges


def _with_sums(
    prepared: Network, ranges: Ranges, calibration: Calibration, left: Mapping[str, str], heard: list[str], enough_db: float, run_of: RunOf
) -> Ranges:
    """`ranges`, with residual additions in floating point if the outputs have less than `enough_db` in FP8 and gain by it."""
    assert calibration.samples is not None
    names = [x.name for x in find_quantization_sites(prepared, left).layers]
    sums = skip_sums(prepared, left)
    judges = select_samples(calibration.samples(), _JUDGES) if names and sums else []
    if not judges:
        return ranges
    wide = dataclasses.replace(ranges, float_sums=sums)
    near, far = _compare_ranges(prepared, judges, names, ranges, lambda near: wide if near < enough_db else None, run_of)
    if far < near + _LEAST_GAIN_DB:
        return ranges
    heard.append(f"FP8: the sums of skip connections stay in 16 bits, which brings {near:.1f} dB to {far:.1f} at the outputs; products are in FP8.")
    return wide


def _compare_ranges(
    prepared: Network,
    judges: Sequence[Mapping[str, np.ndarray]],
    names: Sequence[str],
    ranges: Ranges,
    find_others: Callable[[float], Ranges | None],
    run_of: RunOf,
) -> tuple[float, float]:
    """The SNR of the outputs in dB with the ranges, and with those that `find_others` returns for it; -inf for None."""
    first = Analysis(prepared, "fp8", judges, run_of, ranges, workers=count_workers())
    near = first.snr(names)
    others = find_others(near)
    if others is None:
        return near, -np.inf
    return near, Analysis(prepared, "fp8", judges, run_of, others, workers=count_workers(), known=first).snr(names)


def find_sensitive_layers(
    prepared: Network, ranges: Ranges, calibration: Calibration, config: BuildConfig, left: Mapping[str, str], *, enough_db: float = LEAST_DB,
    progress: Progress | None = None, run_of: RunOf | None = None,
) -> dict[str, str]:  # fmt: skip
    """Layers besides `left` that have to stay in floating point for an output SNR of `enough_db`: name -> reason."""
    samples = [] if calibration.samples is None else select_samples(calibration.samples(), _JUDGES)
    if not samples:
        return {}
    judge = Judge(prepared, "fp8", ranges, samples, Budget("snr", enough_db), config, progress, run_of)
    fit = judge.fit([x.name for x in find_quantization_sites(prepared, left).layers], {})
    return {n: f"{why}; with it the outputs have less than {enough_db:g} dB in all" for n, why in fit.dropped.items()}
