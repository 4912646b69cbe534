"""Moves constant factors of a MatMul's operands to its result, or folds them into its constant operand.

Exporters of attention scale queries and keys separately; one scale in the product's epilogue is free. 16-bit operands keep their scales, which
prevent the product from overflowing.
"""

from __future__ import annotations

import numpy as np

from whet.network import Layer, Tensor
from whet.ops._origin import express, make_literal
from whet.ops._strided import RESHAPES
from whet.passes._scale import make_folded_name
from whet.rewrite.constants import make_scalar_weight, round_to, scalar_value, to_float64
from whet.rewrite.graph import Graph
from whet.rewrite.rules import Phase, Skip, rule


@rule("MatMul", phase=Phase.FOLD)
def move_scales(g: Graph, layer: Layer) -> Tensor | Skip | None:
    factor, inputs, skip = 1.0, list(layer.inputs), None
    moved: dict[int, list[Layer]] = {}
    for i, t in enumerate(layer.inputs):
        match = _match_scaled(g, t)
        if match is None or t is None:
            continue
        views, value, times = match
        read = [(t, layer), *((view.needs(0), view) for view in views)]
        if reason := next(filter(None, (g.escapes(x, reader) for x, reader in read)), None):
            skip = Skip(reason)
            continue
        if t.dtype.bits < 32:
            return Skip(f"%{t.name} is {t.dtype}: the product might overflow before it is scaled")
        moved[i] = views
        factor, inputs[i] = factor * times, value
    if inputs == list(layer.inputs):
        return skip
    if not np.isfinite(factor) or factor == 0:
        return Skip(f"the operands are multiplied by {factor}")
    for i, views in moved.items():
        for view in reversed(views):
            inputs[i] = g.add(view.op, inputs[i], *view.inputs[1:], name=view.name, sources=view.sources, **view.attrs)
    for i, t in enumerate(inputs):
        if t is not None and t.weight is not None:
            inputs[i] = g.constant(round_to(express("Mul", to_float64(t.weight), make_scalar_weight(factor)), t.dtype), make_folded_name(t))
            return g.add("MatMul", *inputs)
    product = g.add("MatMul", *inputs, name=f"{layer.name}/product", sources=layer.sources)
    return g.add("Mul", product, g.constant(make_literal(np.array(factor), product.dtype), "scale"))


def _match_scaled(g: Graph, t: Tensor | None) -> tuple[list[Layer], Tensor, float] | None:
    """(layers between that only move values, the last one first, x, c) if `t` is x * c or x / c with a constant c, else None."""
    views: list[Layer] = []
    while (layer := g.maker(t)) is not None and layer.op in (*RESHAPES, "Transpose"):
        views.append(layer)
        t = layer.inputs[0]
    if layer is None or t is None or layer.op not in ("Mul", "Div") or not t.dtype.is_float:
        return None
    pairs = (layer.inputs, layer.inputs[::-1]) if layer.op == "Mul" else (layer.inputs,)
    for x, other in pairs:
        c = scalar_value(other)
        if x is not None and c and x.type == t.type and not x.is_constant:
            return views, x, c if layer.op == "Mul" else 1 / c
    return None
