"""A convolution and the activation behind it become one layer: every activation of one input, with constant parameters."""

from whet.network import Layer, Tensor
from whet.passes._base import Phase, Skip, rule
from whet.passes._fuse import ACTIVATIONS, CONVS, fuse_activation
from whet.passes._graph import Graph


@rule(*ACTIVATIONS, phase=Phase.FUSE, after=["fuse_conv_add"])
def fuse_conv_activation(g: Graph, layer: Layer) -> Tensor | Skip | None:
    return fuse_activation(g, layer, CONVS)
