"""Projections of one value that attention reads (q, k and v, or k and v) become one matrix product, whose columns attention reads in parts.

One product of all columns reads its input once, saves launches, and fills a GPU where each part has fewer tiles than there are multiprocessors.
Products of quantized values are merged too: the scales of their weights' columns are concatenated.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from whet.network import Layer, Tensor, Weight
from whet.ops._origin import express, make_literal
from whet.rewrite.constants import reshape_weight
from whet.rewrite.fusing import PRODUCTS, find_root_op, list_epilogue_steps, outer_tensor
from whet.rewrite.graph import Graph
from whet.rewrite.quantization import find_dequantizer, find_weights_obstacle
from whet.rewrite.rules import Phase, Skip, rule

_RESHAPES = ("Reshape", "Unsqueeze", "Squeeze")


@dataclass(frozen=True)
class _Projection:
    """A product of `x` with constant weights, [inner, columns] or with `transposed` [columns, inner], and at most a bias, which attention reads.
    `scales`: of quantized weights, one or one per column; None for floats."""

    layer: Layer
    x: Tensor
    weights: Weight
    scales: Weight | None
    bias: Weight | None
    transposed: bool

    @property
    def columns(self) -> int:
        return int(self.weights.array.shape[0 if self.transposed else 1])

    @property
    def kind(self) -> tuple:
        """Only products of equal kind are merged."""
        scales = None if self.scales is None else self.scales.type.dtype
        return self.x, self.layer.composite or self.layer.op, self.transposed, self.weights.type.dtype, scales, self.layer.outputs[0].shape[:-1]

    @property
    def scale_of_columns(self) -> Weight:
        """The scale of each column of quantized weights."""
        assert self.scales is not None
        size = self.scales.array.size
        flat = reshape_weight(self.scales, (size,))
        return flat if size == self.columns else express("Expand", flat, shape=(self.columns,))


@rule("Fused", *PRODUCTS, phase=Phase.FUSE, after=("fuse_attention_transposes", "fuse_matmul_bias"), level=2)
def merge_projections(g: Graph, layer: Layer) -> dict[Tensor, Tensor] | Skip | None:
    own = _match_projection(g, layer)
    attention = None if own is None else _find_attention(g, layer)
    if own is None or attention is None:
        return None
    if isinstance(attention, Skip):
        return attention
    parts = []
    for t in attention.inputs:
        while (maker := g.maker(t)) is not None and maker.op in _RESHAPES:
            t = maker.inputs[0]
        other = _match_projection(g, maker)
        if maker is not None and other is not None and other.kind == own.kind and _find_attention(g, maker) is attention:
            parts.append(other)
    parts.sort(key=lambda p: g.position(p.layer))
    return _merge(g, parts) if len(parts) > 1 and parts[0].layer is layer else None


def _find_attention(g: Graph, layer: Layer) -> Layer | Skip | None:
    """The attention layer that alone reads the result of `layer`, as it is or reshaped; a Skip where others read it too; None without one."""
    t, reached = layer.outputs[0], layer
    while True:
        readers = g.readers(t)
        reached = next((r for r in readers if r.composite == "Attention"), readers[0]) if readers else reached
        if reached.composite == "Attention" and t in reached.inputs:
            reason = g.escapes(t, reached)
            return Skip(reason) if reason else reached
        if reached.op not in _RESHAPES or g.escapes(t, reached):
            return None
        t = reached.output


def _match_projection(g: Graph, layer: Layer | None) -> _Projection | None:
    """A product with constant weights, in floating point or quantized, whose epilogue is at most a bias; None for another layer."""
    if layer is None or not find_root_op(layer, PRODUCTS) or list_epilogue_steps(layer) not in ([], ["bias"]) or not layer.outputs[0].dtype.is_float:
        return None
    body = layer.regions["body"].layers if layer.op == "Fused" else [layer]
    head = next(x for x in body if x.op in PRODUCTS)
    x, w, own = (outer_tensor(layer, head.input(i)) for i in range(3))
    if x is None or w is None or w.type.rank != 2 or x.is_constant:
        return None
    a = head.attrs
    weights, scales = _find_weights(g, head, w)
    if weights is None:
        return None
    if head.op == "Gemm" and (a.get("transA") or a.get("alpha", 1.0) != 1 or a.get("beta", 1.0) != 1):
        return None
    others = (outer_tensor(layer, t) for step in body if step is not head for t in step.inputs)
    biases = [t for t in others if t is not None]
    biases += [] if own is None else [own]
    if len(biases) > 1 or any(t.weight is None for t in biases):
        return None
    bias = biases[0].weight if biases else None
    transposed = head.op == "Gemm" and bool(a.get("transB"))
    projection = _Projection(layer, x, weights, scales, bias, transposed)
    return projection if bias is None or bias.array.size == projection.columns else None


def _find_weights(g: Graph, product: Layer, w: Tensor) -> tuple[Weight | None, Weight | None]:
    """The constant weights of a product that reads `w`, and their scales if they are quantized; (None, None) if a kernel cannot read them so."""
    dq = find_dequantizer(g, w)
    if dq is None:
        return w.weight, None
    if dq.needs(0).weight is None or find_weights_obstacle(product.op, dict(product.attrs), dq):
        return None, None
    return dq.needs(0).weight, dq.needs(1).weight


def _merge(g: Graph, parts: list[_Projection]) -> dict[Tensor, Tensor]:
    """The results of `parts` as parts of one product."""
    first, sizes = parts[0], tuple(p.columns for p in parts)
    columns = 0 if first.transposed else 1
    weights = g.constant(express("Concat", *(p.weights for p in parts), axis=columns), "projections.weight")
    if first.scales is not None:
        scales = g.constant(express("Concat", *(p.scale_of_columns for p in parts), axis=0), "projections.scale")
        weights = g.add("DequantizeLinear", weights, scales, axis=columns)
    op = find_root_op(first.layer, PRODUCTS)
    names, biased = [p.layer.name.split(" + ") for p in parts], [p.layer.name for p in parts if p.layer.op == "Fused"]
    named = {"name": " + ".join(n[0] for n in names), "sources": tuple(dict.fromkeys(s for p in parts for s in p.layer.sources))}
    inputs = [first.x, weights]
    if any(p.bias is not None for p in parts):
        zero = make_literal(np.zeros((), first.layer.outputs[0].dtype.numpy))
        biases = (
            reshape_weight(p.bias, (n,)) if p.bias is not None else express("Expand", zero, shape=(n,)) for p, n in zip(parts, sizes, strict=True)
        )
        bias = g.constant(express("Concat", *biases, axis=0), "projections.bias")
        if op == "Gemm":
            y = g.add(op, *inputs, bias, transB=int(first.transposed), **named)
        else:
            y = g.add("Add", g.add(op, *inputs, **named), bias, name=" + ".join(n.split(" + ")[-1] for n in biased))
    else:
        y = g.add(op, *inputs, **({"transB": int(first.transposed)} if op == "Gemm" else {}), **named)
    split = g.add("Split", y, axis=-1, split=sizes)
    return dict(zip((p.layer.outputs[0] for p in parts), split, strict=True))
