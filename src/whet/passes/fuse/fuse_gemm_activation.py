"""A matrix product (Gemm or MatMul) and the activation behind it become one layer."""

from whet.network import Layer, Tensor
from whet.passes._base import Phase, Skip, rule
from whet.passes._fuse import ACTIVATIONS, PRODUCTS, fuse_activation
from whet.passes._graph import Graph


@rule(*ACTIVATIONS, phase=Phase.FUSE, after=["fuse_gemm_add"])
def fuse_gemm_activation(g: Graph, layer: Layer) -> Tensor | Skip | None:
    return fuse_activation(g, layer, PRODUCTS)
