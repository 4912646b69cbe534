"""Folds a batch norm into the convolution that reads it, if none else does: factors of the input channels into the weights, shifts into the bias.

Networks with the norm first (InceptionNeXt, MaxViT, RepMixer) have no convolution before it. The convolution must not be padded: its zeros would be
shifted too. Computed in float64 and rounded once.
"""

from __future__ import annotations

import numpy as np

from whet.network import Layer, Tensor
from whet.ops._origin import express
from whet.ops.conv import get_window_attributes
from whet.passes._scale import make_folded_name
from whet.passes.fold.fold_batch_norm import batch_norm_affine
from whet.rewrite.constants import reshape_weight, round_to, to_float64
from whet.rewrite.graph import Graph
from whet.rewrite.matching import find_maker_of_op
from whet.rewrite.rules import Phase, Skip, rule


@rule("Conv", phase=Phase.FOLD, after=["fold_batch_norm", "merge_parallel_convs"])
def fold_batch_norm_forward(g: Graph, layer: Layer) -> Tensor | Skip | None:
    norm = find_maker_of_op(g, layer.inputs[0], "BatchNormalization")
    w, b = layer.needs(1), layer.input(2)
    if norm is None or norm.output is not layer.inputs[0]:
        return None
    if any(t is not None and t.weight is None for t in (*norm.inputs[1:], w, b)) or not w.dtype.is_float:
        return Skip(f"the weights or the statistics of '{norm.name}' are computed at run time, or integers")
    if reason := g.escapes(norm.output, layer):
        return Skip(reason)
    scale = batch_norm_affine([t.constant() for t in norm.inputs[1:] if t is not None], norm.attrs.get("epsilon", 1e-5))
    assert scale.factor is not None
    assert scale.shift is not None
    if any(get_window_attributes(layer)[2]) and scale.shift.array.any():
        return Skip("it is padded with zeros, which the batch norm would shift")
    k, per, *kernel = (int(d) for d in w.shape)
    group, ones = layer.attrs["group"], (1,) * len(kernel)
    wide = express("Reshape", to_float64(w.constant()), shape=(group, k // group, per, *kernel))
    scaled = express("Mul", wide, reshape_weight(scale.factor, (group, 1, per, *ones)))
    moved = express("Mul", wide, reshape_weight(scale.shift, (group, 1, per, *ones)))
    added = express("ReduceSum", reshape_weight(moved, (k, per * int(np.prod(kernel)))), axes=(1,), keepdims=0)
    bias = added if b is None else express("Add", added, to_float64(b.constant()))
    weights = g.constant(round_to(reshape_weight(scaled, tuple(w.constant().array.shape)), w.dtype), make_folded_name(w))
    name = make_folded_name(b) if b is not None else f"{w.name.removesuffix('.folded').removesuffix('.weight')}.bias"
    return g.add("Conv", norm.inputs[0], weights, g.constant(round_to(bias, w.dtype), name), **layer.attrs)
