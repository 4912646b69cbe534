"""A Gemm between two Reshapes, which merge and split its rows, becomes a MatMul of the rows as they are, and an Add of the bias.

Likewise a MatMul by a constant matrix between two Reshapes of its rows.

Exporters write linear layers of sequences so: [B, S, K] -> [B * S, K] -> Gemm -> [B, S, N]. The Reshape before the product
merges only the axes that it must, often none.
"""

from __future__ import annotations

from whet.network import Layer, Tensor
from whet.ops._origin import express
from whet.ops._strided import RESHAPES
from whet.rewrite.constants import reshape_weight
from whet.rewrite.graph import Graph
from whet.rewrite.matching import find_maker_of_op
from whet.rewrite.rules import Phase, Skip, rule


@rule(*RESHAPES, phase=Phase.CLEAN, after=["cancel_reshapes"])
def gemm_to_matmul(g: Graph, layer: Layer) -> Tensor | Skip | None:
    gemm, y = find_maker_of_op(g, layer.inputs[0], "Gemm"), layer.output
    if (product := find_maker_of_op(g, layer.inputs[0], "MatMul")) is not None:
        return _replace_between_reshapes(g, layer, product)
    if gemm is None or y.type.rank < 3 or y.shape[-1] != gemm.output.shape[-1]:
        return None
    a, b, c, attrs = gemm.needs(0), gemm.needs(1), gemm.input(2), gemm.attrs
    if attrs["transA"] or attrs["alpha"] != 1.0 or (c is not None and attrs["beta"] != 1.0) or b.weight is None:
        return Skip(f"'{gemm.name}' has factors, transposed rows or weights computed at run time")
    if c is not None and (c.weight is None or c.weight.array.size not in (1, y.shape[-1]) or c.shape[-1:] not in ((), (1,), y.shape[-1:])):
        return Skip(f"the bias of '{gemm.name}' is not a constant per column")
    if reason := g.escapes(gemm.output, layer):
        return Skip(reason)
    rows = (*y.shape[:-1], a.shape[1])
    if any(d == 0 for d in rows) or not g.is_sized(rows):
        return Skip(f"the shape of %{y.name}: {y.type} is not known")
    weights = g.constant(express("Transpose", b.weight, perm=(1, 0)), b.name) if attrs["transB"] else b
    split = g.add("Reshape", a, shape=rows, name=f"{layer.name}_rows", sources=layer.sources)
    product = g.add("MatMul", split, weights, name=gemm.name, sources=gemm.sources)
    if c is None:
        return product
    assert c.weight is not None
    bias = c if c.type.rank <= 1 else g.constant(reshape_weight(c.weight, (c.weight.array.size,)), c.name)
    return g.add("Add", product, bias, sources=gemm.sources)


def _replace_between_reshapes(g: Graph, layer: Layer, product: Layer) -> Tensor | Skip | None:
    (x, weights), y = product.inputs, layer.output
    before = g.maker(x)
    if x is None or before is None or before.op not in RESHAPES or weights is None or not weights.is_constant or weights.type.rank != 2:
        return None
    rows = (*y.shape[:-1], x.shape[-1])
    if y.shape[-1] != weights.shape[1] or y.type.rank < 3 or any(d == 0 for d in rows) or not g.is_sized(rows):
        return None
    if reason := g.escapes(product.output, layer):
        return Skip(reason)
    split = g.add("Reshape", x, shape=rows, name=f"{layer.name}_rows", sources=layer.sources)
    return g.add("MatMul", split, weights, name=product.name, sources=product.sources)
