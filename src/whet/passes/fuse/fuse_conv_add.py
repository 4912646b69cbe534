"""A residual Add goes into the convolution that makes one of its inputs (the later one, when both are)."""

from whet.network import Layer, Tensor
from whet.passes._base import Phase, Skip, rule
from whet.passes._fuse import CONVS, fuse_add
from whet.passes._graph import Graph


@rule("Add", phase=Phase.FUSE)
def fuse_conv_add(g: Graph, layer: Layer) -> Tensor | Skip | None:
    return fuse_add(g, layer, CONVS)
