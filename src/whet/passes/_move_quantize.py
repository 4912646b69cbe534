"""Layers that commute with quantization: they compute the same on integers as on the dequantized values."""

from __future__ import annotations

from typing import Any

import numpy as np

from whet.network import Layer, Tensor
from whet.ops import is_data_sized
from whet.ops._origin import express, make_literal
from whet.rewrite.graph import Graph

MOVES = (
    "DepthToSpace", "Flatten", "MaxPool", "Pad", "Reshape", "Resize", "Slice", "SpaceToDepth", "Squeeze", "Transpose", "Unsqueeze",
)  # fmt: skip


def why_values_change(layer: Layer) -> str | None:
    """Why a layer of MOVES computes new values; None when it only moves values."""
    if layer.op == "Resize" and layer.attrs.get("mode", "nearest") != "nearest":
        return f"'{layer.name}' interpolates: it computes new values"
    if layer.op == "Pad" and layer.attrs["mode"] == "constant":
        value = layer.input(2)
        if value is not None and not value.is_constant:
            return f"the padding value of '{layer.name}' is computed at run time"
    if is_data_sized(layer):
        return f"the size of '{layer.name}' depends on the data"
    return None


def is_padding_exact(layer: Layer, scale: Tensor, zero: Tensor | None) -> bool:
    """True if an integer represents the padding value of a Pad exactly (as one always does 0)."""
    value = layer.input(2)
    if layer.op != "Pad" or layer.attrs["mode"] != "constant" or value is None:
        return True
    padding = float(value.array().reshape(-1)[0])
    step = float(scale.array().reshape(-1)[0])
    at = 0 if zero is None else int(zero.array().reshape(-1)[0])
    whole = round(padding / step) + at
    low, high = (0, 255) if zero is None or zero.dtype.kind == "uint" else (-128, 127)
    return low <= whole <= high and np.float32((whole - at) * np.float32(step)) == np.float32(padding)


def add_on_integers(g: Graph, layer: Layer, *values: Tensor, rounding: Layer) -> Any:
    """Adds a copy of the layer that reads `values` (integers) instead of its data inputs; shape inputs are kept.

    The scale and zero point of `rounding` (the Q or DQ layer that moves) determine the padding value of a Pad.
    """
    if layer.op == "Concat":
        return g.add(layer.op, *values, **layer.attrs)
    rest = list(layer.inputs[1:])
    if layer.op == "Pad" and layer.attrs["mode"] == "constant":
        rest += [None] * (2 - len(rest))
        rest[1] = _add_padding_integer(g, layer, values[0], rounding)
    return g.add(layer.op, *values, *rest, **layer.attrs)


def _add_padding_integer(g: Graph, layer: Layer, q: Tensor, rounding: Layer) -> Tensor:
    """The integer that represents the padding value of a Pad."""
    value, scale, zero = layer.input(2), rounding.needs(1), rounding.input(2)
    number = np.zeros((), np.float32) if value is None else np.asarray(value.array(), np.float32).reshape(())
    args = [make_literal(number), express("Reshape", scale.constant(), shape=())]
    if zero is not None and zero.weight is not None:
        args.append(express("Reshape", zero.weight, shape=()))
    more = {} if zero is not None else {"output_dtype": q.dtype}
    return g.constant(express("QuantizeLinear", *args, **more), f"{layer.name}.filled")
