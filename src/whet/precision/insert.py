"""Q/DQ insertion: activations by their ranges, weights per output channel; lowering passes turn the result into quantized layers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, MutableMapping
from functools import partial
from weakref import WeakKeyDictionary

import numpy as np

from whet.errors import CalibrationError
from whet.network import F8E4M3, Layer, Network, Origin, Tensor, Weight
from whet.ops._origin import express, make_literal
from whet.ops.quantize_linear import LARGEST
from whet.precision.concurrent import count_workers, map_concurrently
from whet.precision.joined import APART, assign_stored_forms
from whet.precision.quantization_sites import QuantizationSites, find_quantization_sites
from whet.precision.ranges import Range, Ranges
from whet.precision.scaling import apply_scalings

_QUANTIZED: MutableMapping[Weight, dict[tuple[str, int], tuple[Weight, Weight]]] = WeakKeyDictionary()
_BLOCK = 1 << 16  # weights whose rounding errors are computed at once


def quantize(
    net: Network,
    ranges: Ranges,
    *,
    skip: Callable[[Layer], bool] | Iterable[str] = (),
    kind: str = "int8",
    small_weights: Callable[[Layer], bool] = lambda layer: False,
) -> Network:
    """Returns a copy of `net` (source stage, batch norms folded) with Q/DQ at the sites that `find_quantization_sites` returns.

    Of the layers to skip, those accepted by `small_weights` get Q/DQ on their weights alone: they compute in floating point with 8-bit weights.
    `kind` is "int8" or "fp8" (e4m3, see float8_scale). Tensors that share a range (the inputs of a Concat) get the union of their ranges.
    Scalings, corrections and float sums of `ranges` are applied. Raises CalibrationError naming the tensors without a range.
    """
    made = apply_scalings(net, ranges.scalings)
    sites = find_quantization_sites(made, skip, ranges.float_sums)
    missing = [t.name for t in sites.roots if t.name not in ranges.tensors]
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise CalibrationError(
            f"there is no range for %{missing[0]}{more}: the calibration is of another model, or of another version of this one. "
            "Calibrate again with --calibData, or name the layers to keep in floating point."
        )
    stored_as = assign_stored_forms(sites, ranges, APART if kind == "int8" else np.inf)  # a larger range costs floats no precision
    if kind == "fp8":  # the search for scales takes long, and NumPy computes it on several threads
        for _ in map_concurrently(partial(_quantize_weights, kind=kind), [x for x in sites.layers if x.name not in ranges.rounded], count_workers()):
            pass
    for layer in sites.layers:
        _insert_weight_quantization(made, layer, kind, ranges.rounded.get(layer.name))
        if layer.name in ranges.corrections:
            _correct(made, layer, ranges.corrections[layer.name])
    for layer in find_quantization_sites(made, lambda x: not small_weights(x)).layers:  # those above have no constant weights any more
        _insert_weight_quantization(made, layer, kind)
    users = made.users()
    for t, (stored, *coarser) in stored_as.items():
        other_readers = {r for f in coarser for r in f.readers or ()}
        own = [r for r, _ in users.get(t, []) if r not in other_readers and (stored.readers is None or r in stored.readers)]
        if kind == "fp8" and stored.readers is not None:
            t, own = _round_after_pool(t, own, users)
        y = _insert_activation_quantization(made, t, stored.range, kind, own)
        for i, form in enumerate(coarser):
            named = f"{t.name}.joined" + (str(i) if i else "")
            _insert_activation_quantization(made, y, form.range, kind, [r for r, _ in users.get(t, []) if r in (form.readers or ())], named, t)
    made.sort()
    made.prune_dead()
    return made


def merge_shared_ranges(sites: QuantizationSites, ranges: Ranges) -> dict[str, Range]:
    """The merged range of each group of tensors."""
    merged: dict[str, Range] = {}
    for group, tensors in sites.groups().items():
        found = ranges.tensors[tensors[0].name]
        for t in tensors[1:]:
            found = found.merge(ranges.tensors[t.name])
        merged[group] = found
    return merged


def _round_after_pool(t: Tensor, readers: list[Layer], users: Mapping[Tensor, list[tuple[Layer, int]]]) -> tuple[Tensor, list[Layer]]:
    """Moves rounding of `t` after a MaxPool that is its only quantized reader: fewer elements are rounded there."""
    while len(readers) == 1 and readers[0].op == "MaxPool" and len(readers[0].outputs) == 1:
        t = readers[0].output
        readers = [r for r, _ in users.get(t, [])]
    return t, readers


def compute_weight_scales(layer: Layer, weights: np.ndarray | None = None) -> np.ndarray:
    """One f32 scale per output channel that maps its largest magnitude to 127; 1 for a zero channel. `weights` replace the layer's own."""
    w = layer.needs(1).array() if weights is None else weights
    axis = get_weight_axis(layer)
    top = np.abs(w).max(axis=tuple(i for i in range(w.ndim) if i != axis)).astype(np.float32)
    if not np.isfinite(top).all():
        raise CalibrationError(f"the weights %{layer.needs(1).name} of '{layer.name}' are not finite")
    return np.where(top > 0, top / np.float32(127), np.float32(1)).astype(np.float32)


def fake_quantize_weights(layer: Layer, w: np.ndarray) -> np.ndarray:
    """Weights in the layer's layout, quantized to 8 bits and dequantized."""
    column = [1] * w.ndim
    column[get_weight_axis(layer)] = -1
    s = compute_weight_scales(layer, w).reshape(column)
    return (np.clip(np.rint(w / s), -128, 127) * s).astype(np.float32)


def compute_float8_scale(range_: Range) -> np.float32:
    """The scale of an e4m3 activation: maps the largest calibrated magnitude to half of the largest e4m3 value. The headroom is free,
    because floating-point rounding is independent of the scale, and larger values on other data do not saturate."""
    return np.float32(max(-range_.low, range_.high, 1e-30) * 2 / LARGEST[F8E4M3])


def compute_float8_weight_scales(layer: Layer, w: np.ndarray) -> np.ndarray:
    """One f32 scale per output channel that minimizes the e4m3 rounding error. A scale only shifts values between powers of two, so eight
    steps of one octave are tried."""
    axis = get_weight_axis(layer)
    flat = np.ascontiguousarray(np.moveaxis(w, axis, 0).reshape(w.shape[axis], -1), np.float32)
    largest = (compute_weight_scales(layer, w) * np.float32(127 / LARGEST[F8E4M3])).astype(np.float32)
    tried = [(largest * np.float32(2 ** (i / 8))).astype(np.float32) for i in range(8)]
    rows = max(1, _BLOCK // max(flat.shape[1], 1))  # blocks of a size that stays in the cache
    errors = np.empty((len(tried), len(flat)), np.float32)
    for start in range(0, len(flat), rows):
        part = flat[start : start + rows]
        for i, scales in enumerate(tried):
            s = scales[start : start + rows, None]
            errors[i, start : start + rows] = np.sum((round_to_float8_grid(part / s) * s - part) ** 2, axis=1)
    return np.choose(np.argmin(errors, axis=0), tried).astype(np.float32)


def round_weights_to_float8(layer: Layer, w: np.ndarray) -> np.ndarray:
    """Weights in the layer's layout, rounded to e4m3 and back to f32."""
    column = [1] * w.ndim
    column[get_weight_axis(layer)] = -1
    s = compute_float8_weight_scales(layer, w).reshape(column)
    return round_to_e4m3(w / s) * s


def round_to_e4m3(a: np.ndarray) -> np.ndarray:
    """Values rounded to the nearest e4m3 (f32), saturating."""
    return np.clip(a, -LARGEST[F8E4M3], LARGEST[F8E4M3]).astype(F8E4M3.numpy).astype(np.float32)


def round_to_float8_grid(a: np.ndarray) -> np.ndarray:
    """As `round_to_e4m3` for finite float32 values, ten times as fast: a sum with 1.5 * 2^20 times a value's power of two has the spacing of e4m3
    values in its last bit."""
    powers = (a.view(np.uint32) & np.uint32(0x7F800000)).view(np.float32)  # of two, at most |a|
    shift = np.maximum(powers, np.float32(2**-6), out=powers)
    shift *= np.float32(1.5 * 2**20)
    y = a + shift
    y -= shift
    return np.clip(y, -LARGEST[F8E4M3], LARGEST[F8E4M3], out=y)


def get_weight_axis(layer: Layer) -> int:
    """The output-channel axis of the weights."""
    if layer.op == "Conv":
        return 0
    return 0 if layer.op == "Gemm" and layer.attrs["transB"] else 1


def _quantize_weights(layer: Layer, kind: str) -> tuple[Weight, Weight]:
    """Scales and quantized weights of a layer. They are kept as long as its weights: the accuracy judge quantizes the same ones in each emulation."""
    known = _QUANTIZED.setdefault(layer.needs(1).constant(), {})
    key = kind, get_weight_axis(layer)
    if key not in known:
        known[key] = _round_weights(layer, kind)
    return known[key]


def _round_weights(layer: Layer, kind: str, rounded: np.ndarray | None = None) -> tuple[Weight, Weight]:
    w, axis = layer.needs(1), get_weight_axis(layer)
    scales = compute_weight_scales(layer)
    if kind == "fp8":
        scale = make_literal(compute_float8_weight_scales(layer, np.asarray(w.array(), np.float32)))
        values = w.constant() if rounded is None else Weight(rounded, Origin("source", f"{w.name}.rounded"))
        return scale, express("QuantizeLinear", values, scale, axis=axis, output_dtype=F8E4M3)
    scale = make_literal(scales)
    return scale, express("QuantizeLinear", w.constant(), scale, make_literal(np.zeros(scale.array.size, np.int8)), axis=axis)


def _insert_weight_quantization(net: Network, layer: Layer, kind: str, rounded: np.ndarray | None = None) -> None:
    w = layer.needs(1)
    axis = get_weight_axis(layer)
    scale, small = _quantize_weights(layer, kind) if rounded is None else _round_weights(layer, kind, rounded)
    at = net.layers.index(layer)
    q = net.constant(small, f"{w.name}.{small.type.dtype.name}")
    y = net.add("DequantizeLinear", q, net.constant(scale, f"{w.name}.scale"), name=f"{w.name}.dequantized", axis=axis, at=at)
    layer.inputs = tuple(y if t is w and i == 1 else t for i, t in enumerate(layer.inputs))


def _correct(net: Network, layer: Layer, shift: np.ndarray) -> None:
    """Subtracts the mean shift of quantization from the bias."""
    b = layer.input(2)
    if b is not None and b.weight is not None:
        bias = net.constant(express("Sub", b.weight, make_literal(shift.reshape(-1))), f"{b.name}.corrected")
    else:
        bias = net.constant(make_literal(-shift.reshape(-1)), f"{layer.name}.correction")
    layer.inputs = (layer.inputs[0], layer.inputs[1], bias)


def _insert_activation_quantization(
    net: Network, t: Tensor, range_: Range, kind: str, readers: list[Layer], name: str = "", read: Tensor | None = None
) -> Tensor:
    """Inserts Q/DQ on `t` for `readers` of `read` (default: `t`); returns the dequantized tensor."""
    at = 0 if t.maker is None else net.layers.index(t.maker) + 1
    name, read = name or t.name, read or t
    if kind == "fp8":
        scale = net.constant(make_literal(np.asarray(compute_float8_scale(range_))), f"{name}.scale")
        q = net.add("QuantizeLinear", t, scale, name=f"{name}.quantize", at=at, output_dtype=F8E4M3)
        y = net.add("DequantizeLinear", q, scale, name=f"{name}.dequantize", at=at + 1)
    else:
        scale = net.constant(make_literal(np.asarray(range_.scale)), f"{name}.scale")
        zero = net.constant(make_literal(np.asarray(range_.zero, range_.dtype.numpy)), f"{name}.zero")
        q = net.add("QuantizeLinear", t, scale, zero, name=f"{name}.quantize", at=at)
        y = net.add("DequantizeLinear", q, scale, zero, name=f"{name}.dequantize", at=at + 1)
    for r in readers:
        r.inputs = tuple(y if x is read else x for x in r.inputs)
    return y
