"""Scale migration before quantization: channels of a tensor are divided by s, the weights of its readers multiplied by s.

The function of the network is unchanged; its quantization error is not. Two methods select s: cross-layer equalization from the weights
(Nagel et al. 2019, arXiv:1906.04721, equation 11) and SmoothQuant from activations and weights (Xiao et al. 2022, arXiv:2211.10438,
equation 4). A scaling is kept only if it brings the outputs of the readers closer to FP32.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from whet.network import F32, Layer, Network, Tensor, Weight
from whet.ops._origin import express, make_literal
from whet.precision.quantization_sites import WEIGHTED, find_quantization_sites

STEPS = ("equalize", "smooth", "bias")
_THROUGH = ("Relu", "LeakyRelu", "MaxPool", "AveragePool", "GlobalAveragePool", "Identity", "Dropout")  # f(x / s) = f(x) / s for s > 0
_SMOOTH = {"smooth 0.5": 0.5, "smooth 0.75": 0.75}  # migration strength alpha of SmoothQuant
_LIMIT = 1e4  # largest factor of a channel


@dataclass
class Site:
    """A tensor that scale can be moved through: the constants divided (layer, input, axis), the readers, the upper bound of a Clip."""

    tensor: Tensor
    divided: list[tuple[Layer, int, int]] = field(default_factory=list)
    readers: list[Layer] = field(default_factory=list)
    limit: float | None = None
    producer: Layer | None = None


def find_sites(net: Network) -> tuple[dict[str, Site], dict[str, str]]:
    """Sites by tensor name; for the other quantized tensors the reason why scale cannot be moved through them."""
    quantized, users = find_quantization_sites(net), net.users()
    sizes: dict[str, int] = {}
    for t in quantized.roots:
        sizes[quantized.shared[t]] = sizes.get(quantized.shared[t], 0) + 1
    found: dict[str, Site] = {}
    refused: dict[str, str] = {}
    for t in quantized.roots:
        if sizes[quantized.shared[t]] > 1:
            refused[t.name] = "it shares its range with other tensors"
            continue
        got = _make_site(net, t, users, set(quantized.layers))
        if isinstance(got, str):
            refused[t.name] = got
        else:
            found[t.name] = got
    return found, refused


def _make_site(net: Network, t: Tensor, users: Mapping[Tensor, list[tuple[Layer, int]]], own: set[Layer]) -> Site | str:
    if any(t is o for o in net.outputs):
        return "it is an output of the network"
    site = Site(t)
    for reader, i in users.get(t, []):
        if reader not in own or i != 0:
            return f"'{reader.name}' ({reader.op}) reads it and cannot take the scale"
        site.readers.append(reader)
    if not site.readers:
        return "no quantized layer reads it directly"
    x: Tensor | None = t
    while x is not None:
        maker = x.maker
        if maker is None:
            return "it is an input of the network, or is derived from one without weights"
        if x is not t and len(users.get(x, [])) != 1:
            return f"%{x.name} before it has other readers"
        if x is not t and any(x is o for o in net.outputs):
            return f"%{x.name} before it is an output of the network"
        if maker.op in _THROUGH:
            x = maker.inputs[0]
        elif maker.op == "Clip":
            low, high = maker.input(1), maker.input(2)
            if low is None or high is None or not low.is_constant or not high.is_constant or float(low.array().reshape(-1)[0]) != 0:
                return f"'{maker.name}' clips elsewhere than at 0 and a constant"
            if site.limit is not None:
                return "it is clipped twice"
            site.limit = float(high.array().reshape(-1)[0])
            x = maker.inputs[0]
        elif maker.op == "Add" and (side := _find_vector_input(maker, x)) is not None:
            site.divided.append((maker, side, -1))
            x = maker.inputs[1 - side]
        else:
            return _complete_site(site, maker, x)
    return "it has no producer"


def _find_vector_input(layer: Layer, y: Tensor) -> int | None:
    """The index of the Add input that is a constant vector along the last axis, or None."""
    for i, t in enumerate(layer.inputs):
        if t is not None and t.is_constant and t.dtype == F32 and t.type.rank >= 1 and t.array().size == t.shape[-1] == y.shape[-1]:
            return i
    return None


def _complete_site(site: Site, maker: Layer, x: Tensor) -> Site | str:
    """Completes `site` with the layer whose weights (or scale and bias) absorb the division, or returns the reason why none can."""
    last = [r for r in site.readers if r.op != "Conv"]
    if maker.op in WEIGHTED:
        w, b = maker.inputs[1], maker.input(2)
        if w is None or not w.is_constant or w.dtype != F32 or (b is not None and (not b.is_constant or b.array().ndim != 1)):
            return f"the weights of '{maker.name}' are computed, or its bias is not a vector"
        if (maker.op == "Conv") != (not last):
            return f"'{maker.name}' and the readers of the tensor have their channels along different axes"
        if maker.op == "MatMul" and w.type.rank != 2:
            return f"'{maker.name}' multiplies by a batch of matrices"
        axis = 0 if maker.op == "Conv" or maker.attrs.get("transB") else 1
        site.divided.append((maker, 1, axis))
        if b is not None:
            site.divided.append((maker, 2, 0))
    elif maker.op == "LayerNormalization" and last and maker.attrs["axis"] in (-1, x.type.rank - 1) and len(maker.outputs) == 1:
        for i in (1, 2):
            v = maker.input(i)
            if v is not None and (not v.is_constant or v.dtype != F32):
                return f"'{maker.name}' has computed scale or bias"
            if v is not None:
                site.divided.append((maker, i, -1))
    else:
        return f"'{maker.name}' ({maker.op}) before it cannot take the scale"
    if len(last) not in (0, len(site.readers)):
        return "its readers have their channels along different axes"
    site.producer = maker
    return site


def is_channels_last(site: Site) -> bool:
    """True if the channel axis is the last one (matrix products) rather than axis 1 (convolutions)."""
    return site.readers[0].op != "Conv"


def make_reader_factors(layer: Layer, s: np.ndarray) -> np.ndarray:
    """Factors for the weights of a reader: `s` along their input channels, shaped to broadcast."""
    w = layer.needs(1).array()
    if layer.op != "Conv":
        axis = 1 if layer.op == "Gemm" and layer.attrs["transB"] else 0
        return s.reshape([-1 if i == axis else 1 for i in range(w.ndim)])
    groups = layer.attrs["group"]
    if groups == 1:
        return s.reshape([1, -1] + [1] * (w.ndim - 2))
    per = s.reshape(groups, w.shape[1])  # an output channel reads the inputs of its group
    return np.repeat(per, w.shape[0] // groups, axis=0).reshape([w.shape[0], w.shape[1]] + [1] * (w.ndim - 2))


def _find_largest_read(site: Site, count: int) -> np.ndarray:
    """Largest weight magnitude that reads each channel of the tensor."""
    top = np.zeros(count)
    for layer in site.readers:
        w = np.abs(layer.needs(1).array().astype(np.float64))
        if layer.op != "Conv":
            w = w if layer.op == "Gemm" and layer.attrs["transB"] else w.T
            top = np.maximum(top, w.max(axis=0))
            continue
        flat = w.reshape(w.shape[0], w.shape[1], -1).max(axis=2)
        groups = layer.attrs["group"]
        top = np.maximum(top, flat.reshape(groups, -1, w.shape[1]).max(axis=1).reshape(-1))
    return top


def propose_scales(site: Site, largest: np.ndarray, steps: tuple[str, ...]) -> dict[str, np.ndarray]:
    """The s of each enabled method (f32 per channel); `largest` holds the largest magnitude of each channel over the samples."""
    read = _find_largest_read(site, largest.size)
    made: dict[str, np.ndarray] = {}
    if "equalize" in steps and site.producer is not None and site.producer.op in WEIGHTED:
        w = np.abs(site.producer.needs(1).array().astype(np.float64))
        axis = 0 if site.producer.op == "Conv" or site.producer.attrs.get("transB") else 1
        own = w.max(axis=tuple(i for i in range(w.ndim) if i != axis))
        made["equalize"] = _normalize_scales(site, largest, np.sqrt(_compute_ratio(own, read)))
    if "smooth" in steps:
        for name, alpha in _SMOOTH.items():
            with np.errstate(divide="ignore", invalid="ignore"):
                s = np.where((largest > 0) & (read > 0), largest**alpha / read ** (1 - alpha), 1.0)
            made[name] = _normalize_scales(site, largest, s)
    return made


def _compute_ratio(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return np.where((a > 0) & (b > 0), a / np.where(b > 0, b, 1.0), 1.0)


def _normalize_scales(site: Site, largest: np.ndarray, s: np.ndarray) -> np.ndarray:
    """Normalizes `s` to a geometric mean of 1 within limits. Channels that reach the Clip bound keep s = 1; others may grow up to the bound."""
    s = s / np.exp(np.mean(np.log(s)))
    s = np.clip(s, 1 / _LIMIT, _LIMIT)
    if site.limit is not None:
        s = np.where(largest >= site.limit, 1.0, np.maximum(s, 1.001 * largest / site.limit))
    return s.astype(np.float32)


def apply_scalings(net: Network, scalings: Mapping[str, np.ndarray]) -> Network:
    """A copy of `net` with the scalings applied; names that are not sites of this network are ignored."""
    made = net.clone()
    if not scalings:
        return made
    known, _ = find_sites(made)
    for name, s in scalings.items():
        site = known.get(name)
        if site is None:
            continue
        for layer, i, axis in site.divided:
            old = layer.needs(i)
            shape = [1] * old.type.rank
            shape[axis] = s.size
            _exchange(made, layer, i, np.float32(1) / s, tuple(shape))
        for layer in site.readers:
            factor = make_reader_factors(layer, s)
            _exchange(made, layer, 1, factor, factor.shape)
    made.prune_dead()
    return made


def _exchange(net: Network, layer: Layer, i: int, factor: np.ndarray, shape: tuple[int, ...]) -> None:
    """Replaces a constant input of the layer by its product with `factor`."""
    old = layer.needs(i)
    weight: Weight = express("Mul", old.constant(), make_literal(np.asarray(factor, np.float32).reshape(shape)))
    new = net.constant(weight, f"{old.name}.scaled")
    layer.inputs = tuple(new if k == i else t for k, t in enumerate(layer.inputs))
