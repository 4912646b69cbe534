"""Quantized Gemm and MatMul by oneDNN: u8 or i8 by i8, constant or computed at run time, bias and epilogue in floats; integer or float result.

For coverage: installations without the extra `jit`, which have no compiled kernels.
"""

from __future__ import annotations

from math import prod

import numpy as np

from whet.backends import Backend
from whet.network import Layer, static_shape
from whet.tactics._base import Signature, tactic
from whet.tactics.cpu.onednn import _api as dnn
from whet.tactics.cpu.onednn._kernel import Recipe, TwoPrimitives, is_static
from whet.tactics.cpu.onednn._post_ops import make_f32_constant
from whet.tactics.cpu.onednn._quantized import (
    OneDnnQuantized,
    Parts,
    add_scales,
    list_signatures,
    make_quantized_attributes,
    make_weight_key,
    match_real_post_ops,
    require_quantized,
    why_inexact,
    why_inexact_operand,
)


@tactic
class OneDnnQMatMul(OneDnnQuantized, TwoPrimitives):
    ops = ("Gemm", "MatMul")
    kinds = ("matmul", "inner_product")
    version = 2

    def unavailable(self) -> str | None:
        return why_inexact()

    def list_usable(self, recipe: Recipe) -> list[str]:
        names = super().list_usable(recipe)
        # oneDNN 3.2 omits the compensation for signed inputs if it can use AMX, also from implementations that need it
        return [n for n in names if "amx" in n or not n.startswith("brg:")] if any("amx" in n for n in names) else names

    def why_not_parts(self, parts: Parts) -> str | None:
        a, b = (parts.place(t) for t in parts.head.inputs[:2])
        if a not in parts.reads or b not in parts.reads:
            return "one of its operands is not quantized"
        right = parts.view.needs(b)
        if parts.reads[b].zero or parts.reads[b].dtype.name != "i8":
            return "oneDNN takes a symmetric i8 matrix on the right"
        if parts.view.needs(a).is_constant:
            return "the first operand is constant; oneDNN packs the second"
        if any(t is not None and t.type.rank < 2 for t in parts.head.inputs[:2]):
            return "takes matrices, not vectors"
        gemm = parts.head.op == "Gemm"
        if gemm and (parts.head.attrs["transA"] or parts.head.attrs["alpha"] != 1 or parts.head.attrs["beta"] != 1):
            return "transA, alpha and beta are for float products"
        c = parts.place(parts.head.input(2))
        if c is not None and not parts.view.needs(c).is_constant:
            return "its C is computed at run time"
        if not right.is_constant and gemm and parts.head.attrs["transB"]:
            return "transB of a computed matrix is for float products"
        return why_inexact_operand(parts.reads[a])

    def signatures(self, layer: Layer, backend: Backend) -> list[Signature]:
        if self.why_not(layer) or not is_static(layer):
            return []
        parts = require_quantized(layer)
        return list_signatures(parts, "linear", backend)

    def recipe(self, layer: Layer, signature: Signature, backend: Backend) -> Recipe | str:
        return _make_product(layer, signature, "matmul")

    def second_recipe(self, layer: Layer, signature: Signature) -> Recipe | str:
        return _make_product(layer, signature, "inner_product")


def _make_product(layer: Layer, signature: Signature, kind: str) -> Recipe | str:
    """The product as a primitive. With a constant matrix on the right, all axes but the last of the left one are rows."""
    parts = require_quantized(layer)
    head, view = parts.head, parts.view
    a, b, c = (parts.place(t) for t in (*head.inputs, None)[:3])
    assert a is not None  # `why_not_parts` checked it
    assert b is not None
    left, right, target = view.needs(a), view.needs(b), signature.outputs[0].dtype.name
    out, source = static_shape(head.outputs[0].shape), static_shape(left.shape)
    k, n = source[-1], out[-1]
    rows = right.is_constant and right.type.rank == 2
    if kind == "inner_product" and not rows:
        return "an inner product has a constant matrix on its right"

    def flatten_rows(shape: tuple[int, ...]) -> tuple[int, ...] | None:
        if not rows:
            return shape
        if shape == out:
            return (prod(shape[:-1]), shape[-1])
        return (1, shape[-1]) if prod(shape[:-1]) == 1 else None

    seen = flatten_rows(out)
    assert seen is not None
    rank = len(seen)
    channels = (1 if kind == "inner_product" else 1 << (rank - 1), n)
    fused = match_real_post_ops(parts, signature, flatten_rows)
    if isinstance(fused, str):
        return fused
    if not right.is_constant and parts.reads[b].scale.size > 1:
        return "a computed matrix has one scale"
    src = dnn.describe((prod(source[:-1]), k) if rows else (1,) * (rank - len(source)) + source, parts.reads[a].dtype.name)
    stored = static_shape(right.shape)
    trans = bool(head.op == "Gemm" and head.attrs["transB"])
    plain = (*stored[:-2], *(stored[:-3:-1] if trans else stored[-2:]))  # (..., K, N)
    attributes = make_quantized_attributes(fused.post_ops, parts, a, b, channels)
    bias = view.inputs[c] if c is not None else None
    vector = bias is not None and bias.type.elements == n
    if bias is not None and not vector:
        return f"a C of shape {list(map(str, bias.shape))} is not a row"
    shape = (n, k) if kind == "inner_product" else (1,) * (rank - len(plain)) + plain
    weights = dnn.describe(shape, "i8", "any" if right.is_constant else "linear")
    row = dnn.describe((n,) if kind == "inner_product" else (*(1,) * (rank - 1), n), "f32") if vector else None
    first = (dnn.inner_product if kind == "inner_product" else dnn.matmul)(src, weights, row, dnn.describe(seen, target), attributes)
    recipe = Recipe(first, {"src": ("input", a), "dst": ("output", 0)}, 0.0 if parts.stores else None, prod(out) * k)
    fused.fill(recipe)
    add_scales(recipe, parts, a, b)
    if bias is not None:
        key, make = make_f32_constant(bias)
        recipe.constant("bias", key, lambda: make().reshape(-1))
    if not right.is_constant:
        recipe.places["weights"] = ("input", b)
        return recipe

    def make_matrix() -> np.ndarray:
        w = right.array()
        if kind == "inner_product":
            return w if trans else w.T
        return w.T if trans else w

    key = f"{make_weight_key(parts, a, b)}|{kind} {trans}"
    recipe.constant("weights", key, lambda: np.ascontiguousarray(make_matrix()).reshape(shape), dnn.describe(shape, "i8"))
    return recipe


