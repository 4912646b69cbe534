"""Folds Gemm's factors into its constants: alpha into B, beta into C, which becomes a vector; a C with beta 0 is removed."""

from __future__ import annotations

from whet.network import Layer, Tensor
from whet.ops._origin import express
from whet.passes._scale import make_folded_name
from whet.rewrite.constants import make_scalar_weight, reshape_weight, round_to, to_float64
from whet.rewrite.graph import Graph
from whet.rewrite.rules import Phase, Skip, rule


@rule("Gemm", phase=Phase.FOLD, level=0)
def gemm_to_canonical(g: Graph, layer: Layer) -> Tensor | Skip | None:
    if layer.op != "Gemm":
        return None
    a, b, c = layer.inputs[0], layer.inputs[1], layer.input(2)
    alpha, beta = layer.attrs["alpha"], layer.attrs["beta"]
    vector = c is None or c.weight is None or c.type.rank == 1 or c.shape[0] != 1 or c.type.rank != 2
    if alpha == 1 and (beta == 1 or c is None) and vector:
        return None
    if alpha != 1 and (b is None or b.weight is None):
        return Skip(f"alpha={alpha}, and the second matrix is computed at run time")
    if c is not None and beta not in (0, 1) and c.weight is None:
        return Skip(f"beta={beta}, and C is computed at run time")
    if alpha != 1 and b is not None and b.weight is not None:
        b = g.constant(round_to(express("Mul", to_float64(b.weight), make_scalar_weight(alpha)), b.dtype), make_folded_name(b))
    if beta == 0:
        c = None
    if c is not None and c.weight is not None:
        w = c.weight if beta == 1 else round_to(express("Mul", to_float64(c.weight), make_scalar_weight(beta)), c.dtype)
        if c.type.rank == 2 and c.shape[0] == 1:
            w = reshape_weight(w, (int(c.shape[1]),))
        c = c if w is c.weight else g.constant(w, make_folded_name(c))
    return g.add("Gemm", a, b, *([] if c is None else [c]), **{**layer.attrs, "alpha": 1.0, "beta": 1.0})
