"""Activations by lookup table: the input of a SiLU, GELU or Mish is quantized to 8 bits too, so that the activation maps 8 bits to 8 bits.

Evaluating an exponential per element can cost more than the 8-bit convolution before it. The extra rounding error is kept small:
negative values, which these functions map close to zero, are compressed by a LeakyRelu (free in the epilogue of the layer) before rounding
and expanded in the table. The compression factor and the clipping limit minimize the error for normally distributed values whose maximum
corresponds to the calibrated range of the result.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from math import erf

import numpy as np

from whet.network import Layer, Network, Tensor
from whet.ops._origin import make_literal
from whet.precision.quantization_sites import only_moves
from whet.precision.ranges import Ranges

#: The composite kind of a fused layer that evaluates a function of one integer by lookup.
TABLE = "QuantizedTable"
_WEIGHTED = ("Conv", "Gemm", "MatMul")
_SQUEEZES = (1.0, 0.75, 0.5, 0.375, 0.25, 0.125)
_CUTS = (2.0, 3.0, 4.0, 5.0, 6.0, 8.0)
_PARTS = (0.6, 0.8, 1.0)  # clipping limits relative to the largest value, for small ones
LARGEST = 3.5  # the largest value in standard deviations
_LEVELS = 255

Function = Callable[[np.ndarray], np.ndarray]
Users = Mapping[Tensor, list[tuple[Layer, int]]]


def _silu(x: np.ndarray) -> np.ndarray:
    return np.asarray(x / (1 + np.exp(-x)))


def _gelu(x: np.ndarray) -> np.ndarray:
    return np.asarray(x * 0.5 * (1 + np.vectorize(erf)(x / np.sqrt(2))))


def _mish(x: np.ndarray) -> np.ndarray:
    return np.asarray(x * np.tanh(np.log1p(np.exp(x))))


#: Functions that approach x above zero and 0 below.
FUNCTIONS: dict[str, Function] = {"Silu": _silu, "Gelu": _gelu, "Mish": _mish}


@dataclass(frozen=True)
class Code:
    """Quantization of an activation input: values below zero times `squeeze`, then u8 with `scale` and zero point `zero`."""

    squeeze: float
    scale: np.float32
    zero: int


def insert_tables(net: Network, ranges: Ranges) -> int:
    """Inserts Q/DQ before activations of quantized layers in `net` (from `precision.quantize`, INT8), in place; returns their number.

    An activation qualifies when a quantized layer produces its input for it alone and all readers of its result quantize it.
    """
    users, count = net.users(), 0
    for layer in list(net.layers):
        found = _match_activation(net, layer, users)
        if found is None:
            continue
        kind, x, quantizers = found
        highest, own = max(get_highest_value(q) for q in quantizers), ranges.tensors.get(layer.output.name)
        if own is not None:
            highest = min(highest, own.high)  # the integers may cover a larger range when a Concat shares it
        if not np.isfinite(highest) or highest <= 0:
            continue
        insert(net, x, [r for r, _ in users[x]], find_code(kind, float(np.float32(highest))))
        count += 1
    if count:
        net.sort()
    return count


@cache
def find_code(kind: str, highest: float) -> Code:
    """The encoding with the smallest error for activation `kind` ("Silu", "Gelu", "Mish") with results up to `highest`."""
    f = FUNCTIONS[kind]
    top = highest
    for _ in range(60):  # fixed-point iteration for f(top) = highest
        top += highest - float(f(np.array(top)))
    x = np.linspace(-LARGEST, LARGEST, 1401) * (top / LARGEST)
    weight = np.exp(-0.5 * (x * LARGEST / top) ** 2)
    best, least = Code(1.0, np.float32(1), 0), np.inf
    for squeeze in _SQUEEZES:
        for cut in (*(c for c in _CUTS if c < top), *(p * top for p in _PARTS)):
            step = (top + squeeze * cut) / _LEVELS
            zero = int(np.rint(squeeze * cut / step))
            q = np.clip(np.rint(np.where(x < 0, squeeze * x, x) / step) + zero, 0, _LEVELS) - zero
            back = np.where(q < 0, q / squeeze, q) * step
            # Values are uniform within a step, so the rounding error is the step times the slope, independent of the grid of x.
            slope = np.gradient(f(x), x) * np.where(x < 0, step / squeeze, step)
            cut_off = np.where(q == -zero, f(back) - f(x), 0.0)
            error = float(np.sum(weight * (slope**2 / 12 + cut_off**2)))
            if error < least:
                best, least = Code(squeeze, np.float32(step), zero), error
    return best


def _match_activation(net: Network, layer: Layer, users: Users) -> tuple[str, Tensor, list[Layer]] | None:
    """(kind, input, Q layers that read the result) if `layer` ends an activation that may become a table; else None."""
    x, inner = (layer.inputs[0], ()) if layer.op in ("Gelu", "Mish") or _is_swish(layer) else _match_silu(layer)
    if x is None or x.maker is None or layer.attrs.get("approximate", "none") not in ("none", "tanh"):
        return None
    own = {layer, *inner}
    if any(r not in own for r, _ in users.get(x, [])) or any(x is o or layer.output is o for o in net.outputs):
        return None
    readers = [r for r, _ in users.get(layer.output, [])]
    if not readers or any(r.op != "QuantizeLinear" for r in readers) or not _is_quantized_product(x.maker):
        return None
    return layer.op if layer.op in FUNCTIONS else "Silu", x, readers


def _is_swish(layer: Layer) -> bool:
    return layer.op == "Swish" and layer.attrs.get("alpha", 1.0) == 1.0


def _match_silu(layer: Layer) -> tuple[Tensor | None, tuple[Layer, ...]]:
    """The tensor x and the Sigmoid layer of x * Sigmoid(x)."""
    if layer.op == "Mul":
        for x, gate in (layer.inputs, layer.inputs[::-1]):
            if x is not None and gate is not None and gate.maker is not None and gate.maker.op == "Sigmoid" and gate.maker.inputs[0] is x:
                return x, (gate.maker,)
    return None, ()


def _is_quantized_product(layer: Layer) -> bool:
    """True if a layer is a convolution or matrix product of dequantized operands, optionally followed by its bias."""
    if layer.op == "Add":
        parts = [t for t in layer.inputs if t is not None and not t.is_constant]
        return len(parts) == 1 and parts[0].maker is not None and parts[0].maker.op == "MatMul" and _is_quantized_product(parts[0].maker)
    return layer.op in _WEIGHTED and all(_is_dequantized(t) for t in layer.inputs[:2])


def _is_dequantized(t: Tensor | None) -> bool:
    """True if a tensor is dequantized, directly or through layers that only move values."""
    maker = None if t is None else t.maker
    if maker is None or maker.op == "DequantizeLinear":
        return maker is not None
    return only_moves(maker) and all(_is_dequantized(x) for x in (maker.inputs if maker.op == "Concat" else maker.inputs[:1]))


def get_highest_value(q: Layer) -> float:
    """The largest value that a Q layer represents without saturating."""
    scale, zero = q.inputs[1], q.input(2)
    if scale is None or scale.weight is None or scale.array().size != 1 or q.output.dtype.name not in ("i8", "u8"):
        return np.inf
    at = 0 if zero is None else int(zero.array().reshape(-1)[0])
    return float(scale.array().reshape(-1)[0]) * ((127 if q.output.dtype.name == "i8" else 255) - at)


def insert(net: Network, x: Tensor, readers: list[Layer], code: Code) -> None:
    """Inserts x -> compress -> Q -> DQ -> expand for all readers of x."""
    scale = net.constant(make_literal(np.asarray(code.scale)), f"{x.name}.scale")
    zero = net.constant(make_literal(np.asarray(code.zero, np.uint8)), f"{x.name}.zero")
    assert x.maker is not None, f"{x} is an input or a constant: no activation computed it"
    at = net.layers.index(x.maker) + 1
    y = x
    if code.squeeze != 1:
        y = net.add("LeakyRelu", x, name=f"{x.name}.squeeze", alpha=code.squeeze, at=at)
        at += 1
    q = net.add("QuantizeLinear", y, scale, zero, name=f"{x.name}.quantize", at=at)
    y = net.add("DequantizeLinear", q, scale, zero, name=f"{x.name}.dequantize", at=at + 1)
    if code.squeeze != 1:
        y = net.add("LeakyRelu", y, name=f"{x.name}.stretch", alpha=1 / code.squeeze, at=at + 2)
    for r in readers:
        r.inputs = tuple(y if t is x else t for t in r.inputs)
