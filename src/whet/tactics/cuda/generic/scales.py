"""QuantizeLinear and DequantizeLinear with scales per channel or per block, or computed at run time."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from whet.network import Layer, static_shape
from whet.tactics._base import tactic
from whet.tactics.cuda.generic._per_value import PerValueTactic, emit_coordinates, emit_flat_index


def _scale_index(layer: Layer) -> str:
    """The index of the scale of element i."""
    shape, scales = static_shape(layer.needs(0).shape), static_shape(layer.needs(1).shape)
    axis, block = layer.attrs["axis"], layer.attrs["block_size"]
    if prod(scales) == 1:
        return "0"
    places = emit_coordinates(shape)
    if not block:
        return places[axis % len(shape)]
    places[axis % len(shape)] += f" / {block}"
    return emit_flat_index([f"({p})" for p in places], scales)


def _quantize(layer: Layer) -> str:
    to = layer.outputs[0].dtype
    top = 2 ** (to.bits - (to.kind == "int")) - 1
    low = -top - 1 if to.kind == "int" else 0
    zero = " + in2(k)" if layer.input(2) is not None else ""
    return f"""
        const long long k = {_scale_index(layer)}; const Number v = rint(in0(i) / in1(k)){zero};
        index0(i, v != v ? 0ll : v <= (Number){low} ? {low}ll : v >= (Number){top} ? {top}ll : (long long)v);
    """


def _dequantize(layer: Layer) -> str:
    zero = " - at2(k)" if layer.input(2) is not None else ""
    return f"const long long k = {_scale_index(layer)}; put0(i, (Number)(at0(i){zero}) * in1(k));"


@tactic
class Scales(PerValueTactic):
    """Row-major; scales keep their type."""

    ops = ("QuantizeLinear", "DequantizeLinear")

    def allows_16_bits(self, layer: Layer) -> bool:
        return False

    def why_no_code(self, layer: Layer) -> str | None:
        stored = layer.outputs[0] if layer.op == "QuantizeLinear" else layer.needs(0)
        return None if stored.dtype.kind in ("int", "uint") and stored.dtype.bits <= 32 else f"converts to and from integers, not {stored.dtype}"

    def launches(self, layer: Layer) -> Sequence[tuple[str, int]]:
        body = _quantize if layer.op == "QuantizeLinear" else _dequantize
        return [(body(layer), prod(static_shape(layer.outputs[0].shape)))]
