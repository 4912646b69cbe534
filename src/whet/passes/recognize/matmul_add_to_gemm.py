"""MatMul by a constant matrix, plus a constant vector, becomes Gemm."""

from __future__ import annotations

from whet.network import Layer, Tensor
from whet.rewrite.graph import Graph
from whet.rewrite.rules import Phase, Skip, rule


@rule("Add", phase=Phase.RECOGNIZE)
def matmul_add_to_gemm(g: Graph, layer: Layer) -> Tensor | Skip | None:
    for value, bias in (layer.inputs, layer.inputs[::-1]):
        product = g.maker(value)
        if product is None or value is None or bias is None or product.op != "MatMul":
            continue
        a, b = product.inputs
        if a is None or b is None or a.type.rank != 2 or b.type.rank != 2 or not b.is_constant or not bias.is_constant:
            continue
        if bias.shape not in (b.shape[1:], (1, *b.shape[1:])) or layer.output.type != value.type:
            return Skip(f"%{bias.name}: {bias.type} is not a vector along the columns of %{value.name}: {value.type}")
        if reason := g.escapes(value, layer):
            return Skip(reason)
        return g.add("Gemm", a, b, bias)
    return None
