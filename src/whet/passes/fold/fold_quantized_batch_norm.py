"""Folds a batch norm after a convolution or Gemm with quantized weights into the weights' scales and the bias; the integers are unchanged."""

from __future__ import annotations

import numpy as np

from whet.network import Layer, Tensor
from whet.ops._origin import express
from whet.passes._scale import make_folded_name
from whet.passes.fold.fold_batch_norm import batch_norm_affine
from whet.rewrite.constants import make_scalar_weight, reshape_weight, round_to, to_float64
from whet.rewrite.graph import Graph
from whet.rewrite.quantization import find_dequantizer, find_weights_obstacle
from whet.rewrite.rules import Phase, Skip, rule


@rule("BatchNormalization", phase=Phase.FOLD, after=["fold_batch_norm", "quantize_weights"], level=0)
def fold_quantized_batch_norm(g: Graph, layer: Layer) -> Tensor | Skip | None:
    head = g.maker(layer.inputs[0])
    if head is None or head.op not in ("Conv", "Gemm"):
        return None
    dq, b = find_dequantizer(g, head.inputs[1]), head.input(2)
    if dq is None or dq.needs(0).weight is None:
        return None
    statistics = [t.weight for t in layer.inputs[1:] if t is not None and t.weight is not None]
    if len(statistics) != 4 or (b is not None and b.weight is None):
        return Skip("its statistics, or the bias before it, are computed at run time")
    if reason := find_weights_obstacle(head.op, dict(head.attrs), dq) or g.escapes(head.output, layer):
        return Skip(reason)
    own = batch_norm_affine(statistics, layer.attrs.get("epsilon", 1e-5))
    assert own.factor is not None
    assert own.shift is not None
    w, scale = dq.needs(0), dq.needs(1)
    n = own.factor.array.size
    scales = reshape_weight(to_float64(scale.constant()), (scale.array().size,))
    folded = round_to(express("Mul", scales, reshape_weight(own.factor, (n,))), scale.dtype)
    if not np.all(np.isfinite(folded.array)):
        return Skip(f"a scale of %{w.name} would overflow {scale.dtype}")
    axis = 0 if head.op == "Conv" or head.attrs.get("transB") else 1
    weights = g.add("DequantizeLinear", w, g.constant(folded, make_folded_name(scale)), axis=axis)
    shift = reshape_weight(own.shift, (n,))
    if b is not None and b.weight is not None and not (head.op == "Gemm" and head.attrs["beta"] == 0):
        bias = to_float64(b.weight) if head.op == "Conv" else express("Mul", to_float64(b.weight), make_scalar_weight(head.attrs["beta"]))
        if bias.array.size not in (1, n):
            return Skip(f"%{b.name}: {b.type} is not a bias per channel")
        flat = reshape_weight(bias, (bias.array.size,))
        shift = express("Add", express("Mul", flat, reshape_weight(own.factor, (n,))), shift)
    name = make_folded_name(b) if b is not None else f"{w.name}.bias"
    attrs = {**head.attrs, "beta": 1.0} if head.op == "Gemm" else dict(head.attrs)
    return g.add(head.op, head.inputs[0], weights, g.constant(round_to(shift, head.output.dtype), name), **attrs)
