"""A constant bias along the last axis goes into the MatMul before it: Add(MatMul(x, w), b) -> one layer."""

from whet.network import Layer, Tensor
from whet.passes._base import Phase, Skip, rule
from whet.passes._fuse import anchored, fuse, obstacle, steps
from whet.passes._graph import Graph


@rule("Add", phase=Phase.FUSE, after=["fuse_gemm_scale"])
def fuse_matmul_bias(g: Graph, layer: Layer) -> Tensor | Skip | None:
    for value, bias in (layer.inputs, layer.inputs[::-1]):
        head = g.maker(value)
        if head is None or value is None or bias is None or not bias.is_constant or not anchored(head, ("MatMul",)):
            continue
        if bias.type.rank != 1 or bias.shape != value.shape[-1:]:
            return Skip(f"%{bias.name}: {bias.type} is no vector along the last axis of %{value.name}: {value.type}")
        if reason := obstacle(g, head, value, layer):
            return Skip(reason)
        if set(steps(head)) - {"scale"}:
            return Skip(f"'{head.name}' has an epilogue already")
        return fuse(g, "MatMul", head, layer)
    return None
