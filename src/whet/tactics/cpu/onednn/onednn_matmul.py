"""Gemm and MatMul by oneDNN: constant weights are packed, bias and epilogue are fused; matmul or inner product, whichever is faster."""

from __future__ import annotations

from math import prod

import numpy as np

from whet.backends import Backend
from whet.network import Layer, Tensor, static_shape
from whet.tactics._base import Operand, Signature, tactic
from whet.tactics._fused import find_epilogue_steps, get_root_layer, outer_input, require_epilogue_steps
from whet.tactics.cpu.onednn import _api as dnn
from whet.tactics.cpu.onednn._kernel import Recipe, TwoPrimitives, is_static, list_runtime_tensors, list_storage_types, to_f32
from whet.tactics.cpu.onednn._post_ops import Chain, list_residuals, make_f32_constant, match_post_ops, select_second_operands


@tactic
class OneDnnMatMul(TwoPrimitives):
    ops = ("Gemm", "MatMul")
    kinds = ("matmul", "inner_product")

    def why_not(self, layer: Layer) -> str | None:
        if reason := super().why_not(layer):
            return reason
        head = get_root_layer(layer)
        if any(t is not None and t.dtype.name not in ("f32", "bf16") for t in head.inputs):
            return f"computes floats, not {head.needs(0).dtype}"
        if any(t.type.rank < 2 for t in head.inputs[:2] if t is not None):
            return "takes matrices, not vectors"
        if layer.needs(_get_input_index(layer, head.inputs[0])).is_constant:
            return "the first operand is constant; oneDNN packs the second"
        return "its fused operations do not form a chain" if find_epilogue_steps(layer) is None else None

    def signatures(self, layer: Layer, backend: Backend) -> list[Signature]:
        steps = find_epilogue_steps(layer)
        if steps is None or self.why_not(layer) or not is_static(layer):
            return []
        head = get_root_layer(layer)
        signatures = []
        for dtype in list_storage_types(list_runtime_tensors(layer), backend):
            out = Operand("linear", dtype)
            stored = select_second_operands(steps, layer, out)
            for t in head.inputs:
                i = outer_input(layer, t)
                if i is not None and not layer.needs(i).is_constant:
                    stored[i] = out
            inputs = tuple(stored.get(i) for i in range(len(layer.inputs)))
            own = {outer_input(layer, t) for t in head.inputs}
            signatures += [Signature(inputs, (out,), ((i, 0),)) for i in list_residuals(steps, layer) if i not in own]
            signatures.append(Signature(inputs, (out,)))
        return signatures

    def recipe(self, layer: Layer, signature: Signature, backend: Backend) -> Recipe | str:
        return _Matrices(layer, signature).recipe("matmul")

    def second_recipe(self, layer: Layer, signature: Signature) -> Recipe | str:
        return _Matrices(layer, signature).recipe("inner_product")


def _get_input_index(layer: Layer, tensor: Tensor | None) -> int:
    i = outer_input(layer, tensor)
    assert i is not None
    return i


class _Matrices:
    """One product as a primitive. With a constant matrix on the right, all axes but the last of the left one become rows."""

    def __init__(self, layer: Layer, signature: Signature) -> None:
        self.layer, self.signature, self.head = layer, signature, get_root_layer(layer)
        self.a, self.b = (_get_input_index(layer, t) for t in self.head.inputs[:2])
        left, right = layer.needs(self.a), layer.needs(self.b)
        self.left, self.right = left, right
        gemm = self.head.op == "Gemm"
        self.trans_a, self.trans_b = (bool(gemm and self.head.attrs.get(n)) for n in ("transA", "transB"))
        self.alpha, self.beta = (float(self.head.attrs.get(n, 1.0)) if gemm else 1.0 for n in ("alpha", "beta"))
        self.out = static_shape(self.head.outputs[0].shape)
        self.rows = right.is_constant and right.type.rank == 2 and left.type.rank > 2
        self.dtype = signature.outputs[0].dtype.name

    def _primitive_shape(self, shape: tuple[int, ...]) -> tuple[int, ...] | None:
        """`shape` (padded to the output's rank) in the primitive; None if it has none."""
        if not self.rows:
            return shape
        if shape == self.out:
            return (prod(shape[:-1]), shape[-1])
        return (1, shape[-1]) if prod(shape[:-1]) == 1 else None

    def recipe(self, kind: str) -> Recipe | str:
        epilogue_steps = require_epilogue_steps(self.layer)
        constant = self.right.is_constant
        if kind == "inner_product" and (not constant or self.right.type.rank != 2 or self.trans_a):
            return "an inner product has a constant matrix on its right"
        steps = Chain()
        if self.alpha != 1.0 and not constant:
            steps.post_ops.append(dnn.Eltwise("linear", self.alpha, 0.0))
        bias = self._bias(steps)
        if isinstance(bias, str):
            return bias
        fused = match_post_ops(epilogue_steps, self.layer, self.signature, self._primitive_shape)
        if isinstance(fused, str):
            return fused
        steps.extend(fused)
        first = self._product(kind, bias is not None, steps)
        recipe = Recipe(first, {"src": ("input", self.a), "dst": ("output", 0)}, work=prod(self.out) * self._k)
        steps.fill(recipe)
        if constant:
            self._pack_weights(recipe, kind)
        else:
            recipe.places["weights"] = ("input", self.b)
        if bias is not None:
            recipe.constant("bias", f"{bias.constant().digest}|f32|{self.beta}", lambda: to_f32(bias) * np.float32(self.beta))
        return recipe

    def _bias(self, steps: Chain) -> Tensor | str | None:
        """Gemm's C: a constant row becomes the bias, any other C a binary step."""
        i = outer_input(self.layer, self.head.input(2))
        if i is None or self.beta == 0.0:
            return None
        c = self.layer.needs(i)
        shape = static_shape(c.shape)
        if c.is_constant and shape in ((self.out[-1],), (1, self.out[-1])):
            return c
        if self.beta != 1.0 and not c.is_constant:
            return f"beta {self.beta} with a C that is computed at run time"
        full = (1,) * (len(self.out) - len(shape)) + shape
        name = f"post{len(steps.post_ops)}"
        steps.post_ops.append(dnn.Binary("add", dnn.describe(full, "f32" if c.is_constant else self.dtype)))
        if c.is_constant:
            key, make = make_f32_constant(c)
            steps.constants[name] = (f"{key}|{self.beta}", lambda: make() * np.float32(self.beta))
        else:
            steps.places[name] = ("input", i)
        return None

    @property
    def _k(self) -> int:
        shape = static_shape(self.left.shape)
        return shape[-2] if self.trans_a else shape[-1]

    def _product(self, kind: str, bias: bool, steps: Chain) -> dnn.Descriptor:
        n, out = self.out[-1], self._primitive_shape(self.out)
        assert out is not None
        if kind == "inner_product":
            rows = prod(self.out[:-1])
            layouts = (dnn.describe(s, self.dtype, f) for s, f in (((rows, self._k), "linear"), ((n, self._k), "any")))
            src, weights = layouts
            dst = dnn.describe((rows, n), self.dtype)
            return dnn.inner_product(src, weights, dnn.describe((n,), "f32") if bias else None, dst, steps.attributes)
        rank = len(out)
        left = (prod(self.out[:-1]), self._k) if self.rows else _pad_rank(static_shape(self.left.shape), rank)
        src = self._orient(left, self.trans_a)
        if self.right.is_constant:
            weights = dnn.describe(_pad_rank(self._weight_shape(), rank), self.dtype, "any")
        else:
            weights = self._orient(_pad_rank(static_shape(self.right.shape), rank), self.trans_b)
        vector = dnn.describe((*(1,) * (rank - 1), n), "f32") if bias else None
        return dnn.matmul(src, weights, vector, dnn.describe(out, self.dtype), steps.attributes)

    def _orient(self, stored: tuple[int, ...], transposed: bool) -> dnn.MemoryDesc:
        """A row-major operand, or its transpose."""
        strides = dnn.compute_row_major_strides(stored)
        if transposed:
            stored, strides = (*stored[:-2], stored[-1], stored[-2]), (*strides[:-2], strides[-1], strides[-2])
        return dnn.describe(stored, self.dtype, strides=strides)

    def _weight_shape(self) -> tuple[int, ...]:
        shape = static_shape(self.right.shape)
        return (*shape[:-2], shape[-1], shape[-2]) if self.trans_b else shape

    def _pack_weights(self, recipe: Recipe, kind: str) -> None:
        """The constant matrix times alpha, described as the primitive's operand, transposed or not."""
        stored, shape = static_shape(self.right.shape), self._weight_shape()
        strides = dnn.compute_row_major_strides(stored)
        turned = (*strides[:-2], strides[-1], strides[-2])
        if kind == "inner_product":  # (N, K)
            given = dnn.describe((shape[1], shape[0]), "f32", strides=strides if self.trans_b else turned)
        else:
            rank = len(self.out) if not self.rows else 2
            lead = (1,) * (rank - len(shape))
            own = turned if self.trans_b else strides
            given = dnn.describe((*lead, *shape), "f32", strides=(*(prod(shape),) * len(lead), *own))
        key = f"{self.right.constant().digest}|{self.alpha}"
        recipe.constant("weights", key, lambda: to_f32(self.right) * np.float32(self.alpha), given)


def _pad_rank(shape: tuple[int, ...], rank: int) -> tuple[int, ...]:
    return (1,) * (rank - len(shape)) + shape
