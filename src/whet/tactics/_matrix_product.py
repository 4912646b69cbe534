"""Gemm and MatMul with a constant matrix on the right: why a layer is none."""

from __future__ import annotations

from math import prod

from whet.network import Layer, static_shape
from whet.tactics._fused import find_epilogue_steps, get_root_layer, outer_input


def why_not_gemm(layer: Layer) -> str | None:
    """Why a Gemm or MatMul is no product with a constant matrix on the right, or None."""
    head = get_root_layer(layer)
    x, w = head.needs(0), head.needs(1)
    i = outer_input(layer, w)
    if i is None or not layer.needs(i).is_constant or w.type.rank != 2:
        return "the second matrix is computed at run time, or has batch axes"
    if head.attrs.get("transA") or x.type.rank < 2:
        return "the first matrix is transposed, or is a vector"
    if head.op == "Gemm" and head.attrs.get("alpha", 1.0) != 1.0:
        return "alpha is not 1"
    b = head.input(2)
    if b is not None:
        j, columns = outer_input(layer, b), static_shape(head.outputs[0].shape)[-1]
        if head.attrs.get("beta", 1.0) != 1.0 or j is None or not layer.needs(j).is_constant or prod(static_shape(b.shape)) != columns:
            return "C is not a constant row, or beta is not 1"
    return None if find_epilogue_steps(layer) is not None else "its fused operations do not form a chain"
