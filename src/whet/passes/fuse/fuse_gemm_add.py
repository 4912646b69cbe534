"""A residual Add goes into the matrix product (Gemm or MatMul) that makes one of its inputs (the later one, when both are)."""

from whet.network import Layer, Tensor
from whet.passes._base import Phase, Skip, rule
from whet.passes._fuse import PRODUCTS, fuse_add
from whet.passes._graph import Graph


@rule("Add", phase=Phase.FUSE, after=["fuse_matmul_bias"])
def fuse_gemm_add(g: Graph, layer: Layer) -> Tensor | Skip | None:
    return fuse_add(g, layer, PRODUCTS)
