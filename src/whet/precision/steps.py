"""Error-reducing steps around calibration, each kept only if it helps: scale migration (scaling.py) and bias correction.

Empirical bias correction (Nagel et al. 2019, arXiv:1906.04721, section 4.2): quantization shifts the mean of a layer's output; the shift,
measured layer by layer on samples, is subtracted from the bias.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from whet.network import Layer, Network
from whet.precision.calibrate import Feeds, compute_layer, crop_middle, list_candidate_ranges
from whet.precision.histogram import Histogram
from whet.precision.insert import fake_quantize_weights, quantize
from whet.precision.methods import LIMITS
from whet.precision.quantization_sites import find_quantization_sites
from whet.precision.ranges import Ranges
from whet.precision.scaling import Site, find_sites, is_channels_last, make_reader_factors, propose_scales

SAMPLES = 16  # samples that evaluate the steps; one half gives a correction, the other validates it
_PAYS = 0.9  # a scaling is kept when it leaves at most this share of the error
_BIAS_PAYS = 0.98
RANGE_METHODS = ("minmax", "mse")  # of the ranges that a scaling is evaluated with
_CROP = 20
_QUIET = 0.01  # floor of a channel's signal power, relative to the mean power


@dataclass
class StepReport:
    """Attempts: (method, tensor or layer, error before, error after, kept), errors as noise-to-signal ratios; and refusals by tensor."""

    tried: list[tuple[str, str, float, float, bool]] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)

    @property
    def kept(self) -> list[tuple[str, str, float, float, bool]]:
        return [t for t in self.tried if t[4]]

    def text(self) -> str:
        """One line with the number of attempts kept per method."""
        names = dict.fromkeys(t[0].split()[0] for t in self.tried)
        parts = [f"{n} {sum(t[4] for t in self.tried if t[0].split()[0] == n)} of {sum(t[0].split()[0] == n for t in self.tried)}" for n in names]
        return "kept of those tried: " + (", ".join(parts) or "nothing")


RunOf = Callable[[Network, list[str]], Callable[[Feeds], Mapping[str, np.ndarray]]]


def find_scalings(
    net: Network, samples: Iterable[Feeds], judges: Sequence[Feeds], run_of: RunOf, steps: tuple[str, ...], zero_points: bool = True,
    tell: Callable[[str], None] | None = None,
) -> tuple[dict[str, np.ndarray], StepReport]:  # fmt: skip
    """Selects the scaling of each tensor of `net` with the smallest reader error on `judges`, if one helps.

    Channel maxima are taken over all `samples`: a channel that is small in some samples and large in others would saturate otherwise.
    """
    found, refused = find_sites(net)
    report = StepReport(refused=refused)
    if not found or not judges:
        return {}, report
    run = run_of(net, list(found))
    tops = _find_channel_maxima(found, samples, run)
    values = [run(f) for f in judges]
    scalings: dict[str, np.ndarray] = {}
    for name, site in found.items():
        xs = [np.asarray(v[name], np.float32) for v in values]
        axis, largest = xs[0].ndim - 1 if is_channels_last(site) else 1, tops[name]
        before = compute_scaling_error(site, xs, axis, None, zero_points)
        best: tuple[str, float, np.ndarray] | None = None
        for what, s in propose_scales(site, largest, steps).items():
            after = compute_scaling_error(site, xs, axis, s, zero_points)
            if best is None or after < best[1]:
                best = (what, after, s)
        if best is not None:
            keep = best[1] <= _PAYS * before
            report.tried.append((best[0], name, before, best[1], keep))
            if keep:
                scalings[name] = best[2]
        if tell is not None:
            tell(name)
    return scalings, report


def _find_channel_maxima(
    sites: Mapping[str, Site], samples: Iterable[Feeds], run: Callable[[Feeds], Mapping[str, np.ndarray]]
) -> dict[str, np.ndarray]:
    """Largest magnitude of each channel over all samples (f64), by tensor."""
    tops: dict[str, np.ndarray] = {}
    for f in samples:
        values = run(f)
        for name, site in sites.items():
            x = np.abs(np.asarray(values[name], np.float32))
            axis = x.ndim - 1 if is_channels_last(site) else 1
            top = x.max(axis=tuple(i for i in range(x.ndim) if i != axis)).astype(np.float64)
            tops[name] = np.maximum(tops[name], top) if name in tops else top
    return tops


def compute_scaling_error(
    site: Site, xs: list[np.ndarray], axis: int, s: np.ndarray | None, zero_points: bool, methods: Sequence[str] = RANGE_METHODS
) -> float:
    """Mean noise-to-signal ratio over the output channels of the readers, with the best range of these methods, after division by `s`.

    Total power would sacrifice channels with small values that later layers may depend on (measured on a MobileNet of 13 blocks: 20 dB
    gained in single depthwise convolutions, 4 dB lost at the logits).
    """
    h = Histogram()
    shape = [1] * xs[0].ndim
    shape[axis] = -1
    scaled = xs if s is None else [x / s.reshape(shape) for x in xs]
    for x in scaled:
        h.add(x, site.tensor.name)
    if h.low == h.high:
        return 0.0
    ranges = list_candidate_ranges(h, {n: LIMITS[n] for n in methods}, zero_points)
    errors = [0.0] * len(ranges)
    for layer in site.readers:
        plain = np.concatenate([crop_middle(x, layer, _CROP) for x in xs])
        want = compute_layer(layer, plain).astype(np.float64)
        others = tuple(i for i in range(want.ndim) if i != (1 if layer.op == "Conv" else want.ndim - 1))
        signal = np.sum(want**2, axis=others)
        signal = signal + _QUIET * signal.mean() + 1e-30
        x = plain if s is None else plain / s.reshape(shape)
        w = layer.needs(1).array()
        w = w if s is None else (w * make_reader_factors(layer, s)).astype(np.float32)
        rounded = fake_quantize_weights(layer, w)
        for k, r in enumerate(ranges):
            noise = np.sum((compute_layer(layer, r.fake_quantize(x), rounded) - want) ** 2, axis=others)
            errors[k] += float(np.mean(noise / signal))
    return min(errors)


def find_corrections(
    net: Network, ranges: Ranges, samples: Sequence[Feeds], run_of: RunOf, kind: str = "int8", tell: Callable[[str], None] | None = None
) -> tuple[dict[str, np.ndarray], StepReport]:
    """Bias corrections of quantized layers (f32 per output channel), if they lower the error on held-out samples.

    Layers are processed in order with everything quantized and earlier corrections applied, so each also compensates the shift that earlier
    layers leave.
    """
    report = StepReport()
    layers = [x for x in find_quantization_sites(net).layers if x.op in ("Conv", "Gemm")]
    if len(samples) < 2 or not layers:
        return {}, report
    outputs = [x.output.name for x in layers]
    exact = run_of(net, outputs)
    wants = [dict(exact(f)) for f in samples]
    corrected = replace(ranges, scalings={}, corrections={})  # `net` already has the scalings applied
    half = len(samples) // 2
    for layer in layers:
        name = layer.output.name
        run = run_of(quantize(net, corrected, kind=kind), [name])
        errors = [np.asarray(run(f)[name], np.float64) - np.asarray(w[name], np.float64) for f, w in zip(samples, wants, strict=True)]
        delta = _average_channels(errors[:half])
        before = sum(float(np.sum(e**2)) for e in errors[half:])
        after = sum(float(np.sum((e - _reshape_scales(layer, delta)) ** 2)) for e in errors[half:])
        keep = after <= _BIAS_PAYS * before
        report.tried.append(("bias", layer.name, before, after, keep))
        if keep:
            corrected.corrections[layer.name] = _average_channels(errors).astype(np.float32)
        if tell is not None:
            tell(layer.name)
    return corrected.corrections, report


def _average_channels(errors: Iterable[np.ndarray]) -> np.ndarray:
    """The mean per output channel (axis 1)."""
    return np.mean([e.mean(axis=tuple(i for i in range(e.ndim) if i != 1)) for e in errors], axis=0)


def _reshape_scales(layer: Layer, v: np.ndarray) -> np.ndarray:
    return v.reshape([1, -1] + [1] * (layer.output.type.rank - 2))
