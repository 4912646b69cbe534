"""QONNX's quantizers Quant, BipolarQuant and Trunc, which Brevitas and hls4ml write: values rounded to integers of any number of bits, as floats.

Their definitions: docs/qonnx-custom-ops of fastmachinelearning/qonnx. Quant to 8 bits is read as QuantizeLinear and DequantizeLinear, quantized
weights of up to 8 bits as DequantizeLinear of integers, so that kernels compute in integers; other widths as arithmetic of floats.
"""

from __future__ import annotations

import numpy as np

from whet.network import Tensor
from whet.ops._ort import add_scalar, make_adder
from whet.ops._refused import read_as_others

_DOMAINS = ("qonnx.custom_op.general.", "onnx.brevitas.", "finn.custom_op.general.")
_ROUNDING = {"ROUND": "Round", "CEIL": "Ceil", "FLOOR": "Floor"}


def _read_number(node, i: int, subject: str) -> int:
    """The value of an input that is one constant whole number."""
    t = node.input(i)
    if t is None or not t.is_constant or t.array().size != 1 or float(t.array().reshape(())) != int(t.array().reshape(())):
        raise node.unsupported(f"its {subject} must be one constant whole number. Export with fixed bit widths")
    return int(t.array().reshape(()))


def _read_float(node, g, i: int) -> Tensor:
    """Input `i` in the type of x. QKeras' converter writes integers and doubles where the definition has floats."""
    x, t = node.inputs[0], node.inputs[i]
    if t.dtype == x.dtype:
        return t
    if t.is_constant:
        return g.constant(t.array().astype(x.dtype.numpy), f"{node.name}.input{i}")
    return g.add("Cast", t, to=x.dtype, name=f"{node.name}_input{i}", sources=(node.name,))


def _find_range(bits: int, signed: int, narrow: int) -> tuple[int, int]:
    """The least and the largest integer."""
    if signed:
        return -(1 << (bits - 1)) + bool(narrow), (1 << (bits - 1)) - 1
    return 0, (1 << bits) - 1 - bool(narrow)


def _find_rounding(node, default: str) -> str:
    mode = node.attrs.get("rounding_mode", default)
    if mode.upper() not in _ROUNDING:
        raise node.unsupported(f"its rounding_mode is {mode!r}; whet rounds by {', '.join(_ROUNDING)}. Export with one of them")
    return _ROUNDING[mode.upper()]


def _find_axis(t: Tensor, rank: int) -> int | None:
    """The axis that a constant of several values broadcasts along; 0 for one value, None for several axes."""
    shape = (1,) * (rank - t.type.rank) + tuple(t.shape)
    long = [i for i, d in enumerate(shape) if d != 1]
    return None if len(long) > 1 or t.type.rank > rank else long[0] if long else 0


def read_quant(node, g):
    """Inputs: x, scale, zero point, bit width."""
    x, scale, zero = node.input(0), _read_float(node, g, 1), _read_float(node, g, 2)
    bits, rounding = _read_number(node, 3, "bit width"), _find_rounding(node, "ROUND")
    signed, narrow = node.attrs.get("signed", 1), node.attrs.get("narrow", 0)
    add = make_adder(node, g)
    if bits == 1 and signed:
        return _add_signs(node, g, x, scale)
    low, high = _find_range(bits, signed, narrow)
    pair = _quantize(node, g, x, scale, zero, low, high) if rounding == "Round" and bits <= 8 else None
    if pair is not None:
        return pair
    integers = add("Add", add("Div", x, scale), zero)
    integers = add(rounding, add("Clip", integers, *(add_scalar(node, g, v, x, s) for v, s in ((low, "low"), (high, "high")))))
    return node.add(g, "Mul", add("Sub", integers, zero), scale)


def _quantize(node, g, x: Tensor, scale: Tensor, zero: Tensor, low: int, high: int):
    """The output as DequantizeLinear of 8-bit integers; None if their results may differ."""
    if not scale.is_constant or not zero.is_constant or x.dtype.name != "f32":
        return None
    points, axis = zero.array(), _find_axis(scale, x.type.rank)
    if axis is None or np.any(points % 2) or _find_axis(zero, x.type.rank) not in (0, axis) or not low <= points.min() <= points.max() <= high:
        return None  # of odd zero points, ties round otherwise
    kind = np.int8 if low < 0 else np.uint8
    full = np.iinfo(kind)
    if not x.is_constant and (low, high) != (full.min, full.max):
        return None
    count = max(scale.array().size, points.size)
    shape = () if count == 1 else (count,)
    scales = g.constant(np.broadcast_to(scale.array().reshape(-1), (count,)).reshape(shape).astype(np.float32), f"{node.name}.scale")
    zeros = g.constant(np.broadcast_to(points.reshape(-1), (count,)).reshape(shape).astype(kind), f"{node.name}.zero_point")
    add = make_adder(node, g)
    if x.is_constant:
        integers = np.clip(np.rint(x.array() / scale.array() + points), low, high).astype(kind)
        quantized = g.constant(integers, f"{node.name}.integers")
    else:
        quantized = add("QuantizeLinear", x, scales, zeros, axis=axis)
    return node.add(g, "DequantizeLinear", quantized, scales, zeros, axis=axis)


def _add_signs(node, g, x: Tensor, scale: Tensor):
    """scale where x / scale is at least 0, otherwise -scale."""
    add = make_adder(node, g)
    positive = add("GreaterOrEqual", add("Div", x, scale), add_scalar(node, g, 0, x, "zero"))
    return node.add(g, "Where", positive, scale, add("Neg", scale))


def read_bipolar(node, g):
    """Inputs: x, scale."""
    return _add_signs(node, g, node.input(0), _read_float(node, g, 1))


def read_trunc(node, g):
    """Inputs: x, scale, zero point, bit width, and either the bit width of the result, or its scale, zero point and bit width."""
    x, scale, zero = node.input(0), _read_float(node, g, 1), _read_float(node, g, 2)
    add, rounding = make_adder(node, g), _find_rounding(node, "FLOOR")
    integers = add("Round", add("Add", add("Div", x, scale), zero))
    if node.input(5) is None:
        factor = 2.0 ** (_read_number(node, 3, "bit width") - _read_number(node, 4, "bit width of the result"))
        kept = add(rounding, add("Div", integers, add_scalar(node, g, factor, x, "factor")))
        return node.add(g, "Mul", add("Sub", kept, zero), scale)
    target = node.input(4)
    if not scale.is_constant or not target.is_constant:
        raise node.unsupported("its scales are computed; whet takes constant ones. Export with fixed scales")
    factors = np.exp2(np.round(np.log2(target.array() / scale.array()))).astype(np.float32)
    factor = g.constant(factors, f"{node.name}.factor")
    low, high = _find_range(_read_number(node, 6, "bit width of the result"), node.attrs.get("signed", 1), node.attrs.get("narrow", 0))
    bounds = [add_scalar(node, g, v, x, s) for v, s in ((low, "low"), (high, "high"))]
    kept = add(rounding, add("Clip", add("Div", integers, factor), *bounds))
    return node.add(g, "Mul", add("Sub", kept, add("Div", zero, factor)), target)


for _name, _read, _instead in (
    ("Quant", read_quant, "QuantizeLinear and DequantizeLinear, or arithmetic"),
    ("BipolarQuant", read_bipolar, "Where"),
    ("Trunc", read_trunc, "arithmetic and Floor"),
):
    read_as_others(_DOMAINS[0] + _name, _read, _instead, tuple(d + _name for d in _DOMAINS))
