"""The projections of attention's queries, keys and values from one tensor become one product, and a Split that attention reads by strides.

At small batches each product alone fills a fraction of the device. Products whose results go elsewhere stay separate: their parts would be copied.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from whet.network import Layer, Tensor
from whet.ops._origin import express, literal
from whet.passes.clean.cancel_reshapes import RESHAPES
from whet.rewrite.constants import reshaped, scalar_value
from whet.rewrite.graph import Graph
from whet.rewrite.rules import Phase, Skip, rule

_REARRANGING = (*RESHAPES, "Transpose", "Expand")
_MOST_LAYERS = 8  # between a projection and the product of attention that reads it
_LARGEST_BIAS = 1 << 16  # values of zeros in place of an absent bias


@dataclass(frozen=True)
class _Projection:
    """x @ weights + bias; `result` is the sum, or the product without a bias."""

    product: Layer
    weights: Tensor
    bias: Tensor | None
    result: Tensor


@rule("MatMul", phase=Phase.FOLD, after=["fold_scale_shift", "move_scales"], level=2)
def merge_projections(g: Graph, layer: Layer) -> dict[Tensor, Tensor] | Skip | None:
    x = layer.inputs[0]
    if x is None or _projection(g, layer) is None:
        return None
    all_of_x = [p for reader in g.readers(x) if reader.op == "MatMul" and (p := _projection(g, reader)) is not None]
    parts = [p for p in all_of_x if _feeds_attention(g, p.result)]
    if len(parts) < 2 or parts[0].product is not layer:
        return None
    if len({p.weights.dtype for p in parts}) > 1 or any(isinstance(p.weights.shape[1], str) for p in parts):
        return None
    sizes = tuple(int(p.weights.shape[1]) for p in parts)
    if any(p.bias is None for p in parts) and max(sizes) > _LARGEST_BIAS:
        return Skip(f"a projection of {max(sizes)} values has no bias")
    weights = g.constant(express("Concat", *(p.weights.weight for p in parts), axis=1), f"{parts[0].weights.name}.merged")
    value = g.add("MatMul", x, weights, sources=tuple(dict.fromkeys(s for p in parts for s in p.product.sources)))
    if any(p.bias is not None for p in parts):
        zeros = (literal(np.zeros(n, parts[0].weights.dtype.numpy)) for n in sizes)
        given = (None if p.bias is None else p.bias.weight for p in parts)
        flat = [z if w is None else reshaped(w, (n,)) for z, w, n in zip(zeros, given, sizes, strict=True)]
        value = g.add("Add", value, g.constant(express("Concat", *flat, axis=0), f"{parts[0].weights.name}.bias"))
    split = g.add("Split", value, axis=value.type.rank - 1, split=sizes)
    return dict(zip((p.result for p in parts), split, strict=True))


def _projection(g: Graph, product: Layer) -> _Projection | None:
    x, weights = product.inputs
    if x is None or x.is_constant or weights is None or weights.weight is None or weights.type.rank != 2 or x.type.rank < 2:
        return None
    y, n = product.output, weights.shape[1]
    readers = g.readers(y)
    if len(readers) == 1 and readers[0].op == "Add" and not g.is_output(y):
        bias = next((t for t in readers[0].inputs if t is not y and t is not None), None)
        if bias is not None and bias.weight is not None and bias.weight.array.size == n == bias.shape[-1] and readers[0].output.type == y.type:
            return _Projection(product, weights, bias, readers[0].output)
    return _Projection(product, weights, None, y)


def _feeds_attention(g: Graph, t: Tensor) -> bool:
    """True if only an attention reads `t`: rearranged and scaled, as an operand of the product before or after a Softmax."""
    for step in range(_MOST_LAYERS):
        readers = g.readers(t)
        if len(readers) != 1 or g.is_output(t):
            return False
        (reader,) = readers
        if reader.op == "MatMul":
            others = [x for x in reader.inputs if x is not t]
            return step > 0 and len(others) == 1 and (_comes_from_softmax(g, others[0]) or _goes_to_softmax(g, reader.output))
        scaled = reader.op in ("Mul", "Div") and step > 0 and any(scalar_value(x) is not None for x in reader.inputs)
        if reader.op not in _REARRANGING and not scaled:
            return False
        t = reader.output
    return False


def _goes_to_softmax(g: Graph, t: Tensor) -> bool:
    for _ in range(_MOST_LAYERS):
        readers = g.readers(t)
        if len(readers) != 1:
            return False
        if readers[0].op == "Softmax":
            return True
        if readers[0].op not in ("Add", "Div", "Mul", "Where", *RESHAPES):
            return False
        t = readers[0].output
    return False


def _comes_from_softmax(g: Graph, t: Tensor | None) -> bool:
    for _ in range(_MOST_LAYERS):
        maker = g.maker(t)
        if maker is None or maker.op not in ("Softmax", "Where", *RESHAPES):
            return False
        if maker.op == "Softmax":
            return True
        t = maker.inputs[2 if maker.op == "Where" else 0]
    return False
