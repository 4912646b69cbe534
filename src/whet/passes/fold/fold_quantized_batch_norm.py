"""A batch norm behind a convolution or Gemm with quantized weights goes into the weights' scales and the bias; the integers stay."""

from __future__ import annotations

import numpy as np

from whet.network import Layer, Tensor
from whet.ops._origin import express
from whet.passes._base import Phase, Skip, rule
from whet.passes._graph import Graph
from whet.passes._quantize import dequantizer, unfit_weights
from whet.passes._scale import folded_name
from whet.passes._weights import narrow, number, shaped, wide
from whet.passes.fold.fold_batch_norm import affine


@rule("BatchNormalization", phase=Phase.FOLD, after=["fold_batch_norm", "quantize_weights"], level=0)
def fold_quantized_batch_norm(g: Graph, layer: Layer) -> Tensor | Skip | None:
    head = g.maker(layer.inputs[0])
    if head is None or head.op not in ("Conv", "Gemm"):
        return None
    dq, b = dequantizer(g, head.inputs[1]), head.input(2)
    if dq is None or dq.inputs[0].weight is None:
        return None
    found = [t.weight for t in layer.inputs[1:] if t is not None and t.weight is not None]
    if len(found) != 4 or (b is not None and b.weight is None):
        return Skip("its statistics, or the bias before it, are computed at run time")
    if reason := unfit_weights(head.op, dict(head.attrs), dq) or g.shared(head.output, layer):
        return Skip(reason)
    own = affine(found, layer.attrs.get("epsilon", 1e-5))
    assert own.factor is not None
    assert own.shift is not None
    w, scale = dq.needs(0), dq.needs(1)
    n = own.factor.array.size
    each = shaped(wide(scale.constant()), (scale.array().size,))
    made = narrow(express("Mul", each, shaped(own.factor, (n,))), scale.dtype)
    if not np.all(np.isfinite(made.array)):
        return Skip(f"a scale of %{w.name} would leave {scale.dtype}")
    axis = 0 if head.op == "Conv" or head.attrs.get("transB") else 1
    weights = g.add("DequantizeLinear", w, g.constant(made, folded_name(scale)), axis=axis)
    shift = shaped(own.shift, (n,))
    if b is not None and b.weight is not None and not (head.op == "Gemm" and head.attrs["beta"] == 0):
        bias = wide(b.weight) if head.op == "Conv" else express("Mul", wide(b.weight), number(head.attrs["beta"]))
        if bias.array.size not in (1, n):
            return Skip(f"%{b.name}: {b.type} is no bias a channel")
        flat = shaped(bias, (bias.array.size,))
        shift = express("Add", express("Mul", flat, shaped(own.factor, (n,))), shift)
    name = folded_name(b) if b is not None else f"{w.name}.bias"
    attrs = {**head.attrs, "beta": 1.0} if head.op == "Gemm" else dict(head.attrs)
    return g.add(head.op, head.inputs[0], weights, g.constant(narrow(shift, head.output.dtype), name), **attrs)


