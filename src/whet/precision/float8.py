"""The FP8 (e4m3) recipe: layers that stay in higher precision, and bias corrections that compensate the mean shift of rounding.

e4m3 has 3 mantissa bits: the SNR of a rounded tensor is 31 dB at any scale, that of a convolution's output 28 dB. Four effects add
systematic errors to these random ones:
- First layer: pixel values have a large mean, and rounding is relative to the value including its mean.
- Last layers, before which an output follows without another product or normalization: no later layer averages their rounding errors.
- Rounded weights times inputs with non-zero mean (every input after a ReLU) shift the mean of each output channel, and the shifts
  accumulate. The shift follows from the mean input of each filter tap, which calibration measures, and is subtracted from the bias
  (bias correction, Nagel et al. 2019, arXiv:1906.04721, section 4.2).
- Skip connections: the residual stream is rounded once per block without averaging: 27 blocks of 31 dB each leave 17 dB.
Output SNR measured on 1000 CIFAR-10 images (everything in FP8; first and last layers in floating point; corrections added): ResNet-8 (raw
pixels) 19.4, 25.1, 28.8 dB. ResNet-56 with first and last layers and corrections 20.1 dB; with its residual sums in 16 bits 27.8 dB.
"""

from __future__ import annotations

import base64
import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

import numpy as np

from whet.network import F8E4M3, F32, Layer, Network, Tensor
from whet.precision._taps import Taps
from whet.precision.insert import compute_float8_scale, compute_float8_weight_scales, get_weight_axis, round_to_e4m3, round_weights_to_float8
from whet.precision.quantization_sites import WEIGHTED, find_quantization_sites
from whet.precision.ranges import Range, Ranges
from whet.precision.rounding import adapt_weights, compute_moments, fits
from whet.precision.sensitivity import select_samples

SAMPLES = 64  # number of samples that corrections are measured on
_NORMALIZATIONS = frozenset(
    ("LayerNormalization", "RMSNormalization", "GroupNormalization", "InstanceNormalization", "MeanVarianceNormalization", "LpNormalization")
)
_PAYS = 0.98  # a correction is kept when it leaves at most this share of the squared mean shift on held-out samples
Feeds = Mapping[str, np.ndarray]
RunOf = Callable[[Network, list[str]], Callable[[Feeds], Mapping[str, np.ndarray]]]


def list_excluded_layers(net: Network) -> dict[str, str]:
    """Quantizable layers of `net` (prepared) that stay in 16 bits or more under FP8: name -> reason."""
    found: dict[str, str] = {}
    layers = find_quantization_sites(net).layers
    users = net.users()
    for layer in layers:
        c, k = _get_channels(layer)
        if layer.op == "Conv" and layer.attrs["group"] != 1:
            found[layer.name] = "grouped convolution: FP8 tensor-core kernels take one group"
        elif (isinstance(c, int) and c % 16) or (isinstance(k, int) and k % 8):
            found[layer.name] = f"{c} input and {k} output channels: FP8 kernels need multiples of 16 and 8"
        elif _is_first_weighted(net, layer):
            found[layer.name] = "first layer: its inputs are not centred, and FP8 rounds relative to the value"
        elif _reaches_output(net, layer, users):
            found[layer.name] = "last layer: no later layer averages its rounding error"
    return found


def skip_sums(net: Network, skip: Iterable[str] = ()) -> frozenset[str]:
    """Add layers of `net` whose operands FP8 would round when it skips the layers `skip`; they may stay in 16 bits or more."""
    names = set(skip)
    sums = {x.name for x in net.layers if x.op == "Add" and x.inputs[0] is not None and x.inputs[1] is not None and x.name not in names}
    sums = {x.name for x in net.layers if x.name in sums and not any(t.is_constant for t in x.required_inputs())}
    rounded, left = (find_quantization_sites(net, names, s).roots for s in ((), sums))
    return frozenset(sums) if rounded != left else frozenset()


def correct_biases(net: Network, ranges: Ranges, samples: Iterable[Feeds], run_of: RunOf, skip: Iterable[str] = ()) -> Ranges:
    """Returns `ranges` with bias corrections (f32 [output channels]) for the FP8 layers of `net`, except `skip`.

    One FP32 pass over the SAMPLES samples with the smallest digests, so that order has no effect. One half gives a correction, the other
    half validates it; a validated correction is computed from all samples.
    """
    layers = [x for x in find_quantization_sites(net, set(skip)).layers if x.op in ("Conv", "Gemm")]
    if not layers:
        return ranges
    names = list(dict.fromkeys(x.needs(0).name for x in layers))
    scales = {n: compute_float8_scale(r) for n in names if (r := _find_range(net, ranges, n)) is not None}
    run = run_of(net, names)
    sums: dict[str, list[np.ndarray]] = {}
    count = 0
    for feeds in select_samples(samples, SAMPLES):
        values = run(feeds)
        for layer in layers:
            name = layer.needs(0).name
            if name not in scales:
                continue
            x = np.asarray(values[name], np.float32)
            low = round_to_float8(x, scales[name])
            moved = compute_mean_inputs(layer, low), compute_mean_inputs(layer, x)
            mine = sums.setdefault(layer.name, [np.zeros((2, *moved[0].shape)) for _ in range(2)])
            mine[count % 2] += np.stack(moved)
        count += 1
    if count < 2:
        return ranges
    kept = {}
    for layer in layers:
        if layer.name not in sums:
            continue
        halves = [s / n for s, n in zip(sums[layer.name], ((count + 1) // 2, count // 2), strict=True)]
        w = ranges.rounded.get(layer.name)
        shifts = [compute_mean_shift(layer, h[0], h[1], w) for h in halves]
        left_over, before = float(np.sum((shifts[1] - shifts[0]) ** 2)), float(np.sum(shifts[1] ** 2))
        if left_over <= _PAYS * before:
            low, exact = (sums[layer.name][0] + sums[layer.name][1]) / count
            kept[layer.name] = compute_mean_shift(layer, low, exact, w).astype(np.float32)
    return replace(ranges, corrections=kept)


def round_weights_adaptively(
    net: Network, ranges: Ranges, samples: Iterable[Feeds], run_of: RunOf, skip: Iterable[str] = ()
) -> dict[str, np.ndarray]:
    """Adaptively rounded weights (precision.rounding) of FP8 layers, f32 by layer name, if they reduce the error on held-out samples."""
    layers = [x for x in find_quantization_sites(net, set(skip)).layers if fits(x)]
    chosen = select_samples(samples, SAMPLES)
    found: dict[str, np.ndarray] = {}
    if len(chosen) < 2:
        return found
    by_input: dict[str, list[Layer]] = {}
    for layer in layers:
        by_input.setdefault(layer.needs(0).name, []).append(layer)
    for name, readers in by_input.items():  # keeps one tensor of all samples in memory at a time
        own = _find_range(net, ranges, name)
        if own is None:
            continue
        run, scale = run_of(net, [name]), compute_float8_scale(own)
        inputs = [round_to_float8(np.asarray(run(f)[name], np.float32), scale) for f in chosen]
        for layer in readers:
            w = np.asarray(layer.needs(1).array(), np.float32)
            halves = [compute_moments(layer, inputs[i::2], len(inputs[i::2])) for i in (0, 1)]
            scales = compute_float8_weight_scales(layer, w).astype(np.float64)
            made = adapt_weights(layer, w, round_weights_to_float8(layer, w), scales, (halves[0], halves[1]), _make_grid)
            if made is not None:
                found[layer.name] = made
    return found


def _make_grid(column: np.ndarray, scales: np.ndarray) -> np.ndarray:
    return round_to_e4m3((column / scales).astype(np.float32)) * scales


def pack_rounding(net: Network, weights: Mapping[str, np.ndarray]) -> dict[str, str]:
    """Encodes adapted weights as text: offset of each from the nearest e4m3 value, in e4m3 steps (i16, zlib, base64)."""
    by = {x.name: x for x in net.layers}
    return {
        name: base64.b64encode(zlib.compress((_encode_weights(by[name], w) - _encode_weights(by[name], None)).astype("<i2").tobytes(), 9)).decode()
        for name, w in weights.items()
    }


def unpack_rounding(net: Network, packed: Mapping[str, str]) -> dict[str, np.ndarray]:
    """The inverse of pack_rounding. Raises ValueError or KeyError for text of another network."""
    by = {x.name: x for x in net.layers}
    found = {}
    for name, text in packed.items():
        near = _encode_weights(by[name], None)
        try:
            steps = np.frombuffer(zlib.decompress(base64.b64decode(text)), "<i2").reshape(near.shape)
        except zlib.error as e:
            raise ValueError(f"the rounding of '{name}' is damaged: {e}") from e
        codes = near + steps
        values = np.where(codes < 0, 0x80 | -codes, codes).astype(np.uint8).view(F8E4M3.numpy).astype(np.float32)
        found[name] = values * _reshape_scales(by[name])
    return found


def _encode_weights(layer: Layer, w: np.ndarray | None) -> np.ndarray:
    """Weights (None: the layer's own, rounded to nearest) as signed e4m3 indices counted from zero, i32."""
    own = np.asarray(layer.needs(1).array(), np.float32) if w is None else w
    bits = round_to_e4m3(own / _reshape_scales(layer)).astype(F8E4M3.numpy).view(np.uint8).astype(np.int32)
    return np.where(bits & 0x80, -(bits & 0x7F), bits)


def _reshape_scales(layer: Layer) -> np.ndarray:
    """The weight scales, shaped to broadcast over the weights."""
    w = np.asarray(layer.needs(1).array(), np.float32)
    shape = [1] * w.ndim
    shape[get_weight_axis(layer)] = -1
    return compute_float8_weight_scales(layer, w).reshape(shape)


def round_to_float8(x: np.ndarray, scale: np.float32) -> np.ndarray:
    """f32 values rounded to e4m3 with `scale` and back."""
    return np.clip(x / scale, -448, 448).astype(F8E4M3.numpy).astype(np.float32) * scale


def compute_mean_inputs(layer: Layer, x: np.ndarray) -> np.ndarray:
    """Mean input of each filter tap over all positions of all batch items, f64: [c, r, s, ...] for a Conv, [c] otherwise."""
    if layer.op != "Conv":
        return x.reshape(-1, x.shape[-1]).mean(axis=0, dtype=np.float64)
    seen = Taps.of(layer, x)
    out = np.zeros((x.shape[1], *seen.taps))
    for tap in np.ndindex(*seen.taps):
        out[(slice(None), *tap)] = seen.get_elements(tap).mean(axis=(0, *range(2, x.ndim)), dtype=np.float64)
    return out


def compute_mean_shift(layer: Layer, low: np.ndarray, exact: np.ndarray, rounded_weights: np.ndarray | None = None) -> np.ndarray:
    """Shift of each output channel's mean by rounding, f64. `low` and `exact` are mean_inputs of rounded and exact inputs."""
    w = np.asarray(layer.needs(1).array(), np.float32)
    q = round_weights_to_float8(layer, w) if rounded_weights is None else rounded_weights
    if layer.op == "Conv":
        groups = layer.attrs["group"]
        low, exact = (np.repeat(a.reshape(groups, -1), w.shape[0] // groups, axis=0) for a in (low, exact))
        w, q = w.reshape(w.shape[0], -1), q.reshape(w.shape[0], -1)
        return np.asarray(np.sum(q * low - w * exact, axis=1, dtype=np.float64))
    if layer.op == "Gemm" and layer.attrs["transB"]:
        w, q = w.T, q.T
    return low @ q.astype(np.float64) - exact @ w.astype(np.float64)


def _find_range(net: Network, ranges: Ranges, name: str) -> Range | None:
    """The range that tensor `name` is stored with: its own, or that of its producer through layers that only move values."""
    t: Tensor | None = net.tensor(name)
    while t is not None:
        if t.name in ranges.tensors:
            return ranges.tensors[t.name]
        t = t.maker.inputs[0] if t.maker is not None and t.maker.inputs else None
    return None


def _get_channels(layer: Layer) -> tuple[object, object]:
    w = layer.needs(1)
    if layer.op == "Conv":
        return layer.needs(0).shape[1], w.shape[0]
    transposed = layer.op == "Gemm" and layer.attrs["transB"]
    return (w.shape[1], w.shape[0]) if transposed else (w.shape[0], w.shape[1])


def _is_first_weighted(net: Network, layer: Layer) -> bool:
    """True if a network input reaches the layer without passing through another weighted layer."""
    inputs, seen = set(net.inputs), set()
    waiting = [layer.inputs[0]]
    while waiting:
        t = waiting.pop()
        if t is None or t in seen or t.dtype != F32:
            continue
        seen.add(t)
        if t in inputs:
            return True
        if t.maker is not None and not _is_product(t.maker):
            waiting += t.maker.inputs
    return False


def _reaches_output(net: Network, layer: Layer, users: Mapping[Tensor, list[tuple[Layer, int]]]) -> bool:
    """True if the layer's result reaches a network output without passing through another weighted layer or a normalization.

    A normalization divides by the size of its input: the result of one block is a small part of the residual stream in front of it, and so is
    its rounding error. Otherwise each block of a transformer would end in a last layer, as the residual stream reaches the final normalization.
    """
    outputs, seen = set(net.outputs), set()
    waiting = list(layer.outputs)
    while waiting:
        t = waiting.pop()
        if t in seen:
            continue
        seen.add(t)
        if t in outputs:
            return True
        for r, _ in users.get(t, []):
            if not _is_product(r) and r.op not in _NORMALIZATIONS:
                waiting += r.outputs
    return False


def _is_product(layer: Layer) -> bool:
    return layer.op in (*WEIGHTED, "ConvTranspose") and layer.inputs[1] is not None and layer.inputs[1].is_constant
