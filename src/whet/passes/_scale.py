"""Folding y * factor + shift (a value per channel) into the convolution or matrix product that computes y."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from whet.network import Layer, Tensor, Weight
from whet.ops._origin import express
from whet.rewrite.constants import make_scalar_weight, reshape_along_axis, reshape_weight, round_to, to_float64
from whet.rewrite.graph import Graph
from whet.rewrite.rules import Skip


@dataclass(frozen=True)
class Affine:
    """factor and shift in float64, one value per channel; None: 1 and 0."""

    factor: Weight | None = None
    shift: Weight | None = None


def make_folded_name(t: Tensor) -> str:
    """The name of a constant after something was folded into it."""
    return t.name.removesuffix(".folded") + ".folded"


def get_channel_axis(head: Layer) -> int:
    """The axis of the output that holds the weights' output channels."""
    return head.output.type.rank - 1 if head.op in ("Gemm", "MatMul") else 1


def fold_into(g: Graph, head: Layer, layer: Layer, affine: Affine) -> Tensor | Skip:
    """The layer `head` (Conv, ConvTranspose, Gemm, MatMul) with `affine`, which `layer` applies to its output, folded into its weights.

    Computed in float64 and rounded once. Skip when its weights are not constant, or its output is needed as it is.
    """
    x, w, b = head.inputs[0], head.inputs[1], head.input(2)
    if w is None or w.weight is None or (b is not None and b.weight is None):
        return Skip(f"the weights of '{head.name}' are computed at run time")
    if not w.dtype.is_float:
        return Skip(f"the weights of '{head.name}' are {w.dtype}")
    if reason := g.escapes(head.output, layer):
        return Skip(reason)
    n = head.output.shape[get_channel_axis(head)]
    if b is not None and head.op == "Gemm" and (b.type.rank > 1 and b.shape[:-1] != (1,) * (b.type.rank - 1)):
        return Skip(f"%{b.name}: {b.type} is not a bias per column")
    weights = w
    if affine.factor is not None:
        weights = g.constant(round_to(_scale_weight(head, w.weight, affine.factor), w.dtype), make_folded_name(w))
    bias = _fold_bias(head, None if b is None else b.weight, affine)
    attrs = dict(head.attrs)
    if head.op == "Gemm":
        attrs["beta"] = 1.0
    inputs = [x, weights]
    if bias is not None:
        full = bias if bias.array.size == n else express("Expand", reshape_weight(bias, (1,)), shape=(n,))
        name = make_folded_name(b) if b is not None else w.name.removesuffix(".folded").removesuffix(".weight") + ".bias"
        inputs.append(g.constant(round_to(reshape_weight(full, (full.array.size,)), w.dtype), name))
    return g.add(head.op, *inputs, **attrs)


def _scale_weight(head: Layer, w: Weight, factor: Weight) -> Weight:
    """w * factor along the output channels, in float64."""
    rank = w.array.ndim
    if head.op == "Gemm":
        return express("Mul", to_float64(w), reshape_along_axis(factor, 0 if head.attrs.get("transB") else 1, rank))
    if head.op == "MatMul":
        return express("Mul", to_float64(w), reshape_along_axis(factor, rank - 1, rank) if rank > 1 else factor)
    if head.op == "Conv":
        return express("Mul", to_float64(w), reshape_along_axis(factor, 0, rank))
    group, shape = head.attrs["group"], w.array.shape  # ConvTranspose: [C, K / group, ...]
    split = reshape_weight(to_float64(w), (group, shape[0] // group, *shape[1:]))
    factors = reshape_weight(factor, (group, 1, shape[1], *(1,) * (rank - 2)))
    return reshape_weight(express("Mul", split, factors), shape)


def _fold_bias(head: Layer, b: Weight | None, affine: Affine) -> Weight | None:
    """b * factor + shift in float64; None when both are absent."""
    if b is None:
        return affine.shift
    flat = reshape_weight(to_float64(b), (b.array.size,))
    beta = head.attrs.get("beta", 1.0) if head.op == "Gemm" else 1.0
    if beta != 1.0:
        flat = express("Mul", flat, make_scalar_weight(beta))
    if affine.factor is not None:
        flat = express("Mul", flat, affine.factor)
    return flat if affine.shift is None else express("Add", flat, affine.shift)


def to_channel_vector(t: Tensor, value: Tensor, axis: int) -> Weight | None:
    """The constant `t` as a float64 vector along `axis` of `value`, when it broadcasts so; None otherwise."""
    n = value.shape[axis]
    if t.weight is None or not isinstance(n, int) or not t.dtype.is_float or t.type.rank > value.type.rank:
        return None
    full = (1,) * (value.type.rank - t.type.rank) + t.weight.array.shape
    if any(d != 1 for i, d in enumerate(full) if i != axis) or full[axis] not in (1, n):
        return None
    flat = reshape_weight(to_float64(t.weight), (full[axis],))
    return flat if full[axis] == n else express("Expand", flat, shape=(n,))


def are_finite(*weights: Weight | None) -> bool:
    """True if all values are finite: folding must not turn 0 * infinity into NaN."""
    return all(w is None or bool(np.isfinite(w.array).all()) for w in weights)
