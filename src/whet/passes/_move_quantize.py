"""Layers that quantization moves through: what they do to the numbers, they do to the integers."""

from __future__ import annotations

from typing import Any

import numpy as np

from whet.network import Layer, Tensor
from whet.ops._origin import express, literal
from whet.rewrite.graph import Graph

MOVES = (
    "DepthToSpace", "Flatten", "MaxPool", "Pad", "Reshape", "Resize", "Slice", "SpaceToDepth", "Squeeze", "Transpose", "Unsqueeze",
)  # fmt: skip


def mixes(layer: Layer) -> str | None:
    """Why a layer of MOVES makes other numbers than those that it reads; None when it only moves them."""
    if layer.op == "Resize" and layer.attrs.get("mode", "nearest") != "nearest":
        return f"'{layer.name}' interpolates: its results are other numbers"
    if layer.op == "Pad" and layer.attrs["mode"] == "constant":
        value = layer.input(2)
        if value is not None and not value.is_constant:
            return f"what '{layer.name}' pads with is computed at run time"
    return None


def pads_exactly(layer: Layer, scale: Tensor, zero: Tensor | None) -> bool:
    """Whether the number that a Pad fills in is one of the integers' numbers (0 always is)."""
    value = layer.input(2)
    if layer.op != "Pad" or layer.attrs["mode"] != "constant" or value is None:
        return True
    filled = float(value.array().reshape(-1)[0])
    step = float(scale.array().reshape(-1)[0])
    at = 0 if zero is None else int(zero.array().reshape(-1)[0])
    whole = round(filled / step) + at
    low, high = (0, 255) if zero is None or zero.dtype.kind == "uint" else (-128, 127)
    return low <= whole <= high and np.float32((whole - at) * np.float32(step)) == np.float32(filled)


def again(g: Graph, layer: Layer, *values: Tensor, rounding: Layer) -> Any:
    """The layer once more, on integers: `values` in place of the inputs that carry data; shapes and axes stay.

    The scale and zero point of `rounding` (the Q or DQ layer that moves) say which integer a Pad fills in.
    """
    if layer.op == "Concat":
        return g.add(layer.op, *values, **layer.attrs)
    rest = list(layer.inputs[1:])
    if layer.op == "Pad" and layer.attrs["mode"] == "constant":
        rest += [None] * (2 - len(rest))
        rest[1] = _filling(g, layer, values[0], rounding)
    return g.add(layer.op, *values, *rest, **layer.attrs)


def _filling(g: Graph, layer: Layer, q: Tensor, rounding: Layer) -> Tensor:
    """The integer that stands for what a Pad fills in."""
    value, scale, zero = layer.input(2), rounding.needs(1), rounding.input(2)
    number = np.zeros((), np.float32) if value is None else np.asarray(value.array(), np.float32).reshape(())
    args = [literal(number), express("Reshape", scale.constant(), shape=())]
    if zero is not None and zero.weight is not None:
        args.append(express("Reshape", zero.weight, shape=()))
    more = {} if zero is not None else {"output_dtype": q.dtype}
    return g.constant(express("QuantizeLinear", *args, **more), f"{layer.name}.filled")
