"""SiLU spelled out as x * Sigmoid(x) goes into the convolution or matrix product that makes x."""

from whet.network import Layer, Tensor
from whet.passes._base import Phase, Skip, rule
from whet.passes._fuse import CONVS, PRODUCTS, anchored, fuse, obstacle, steps
from whet.passes._graph import Graph


@rule("Mul", phase=Phase.FUSE, after=["fuse_conv_add", "fuse_gemm_add"])
def fuse_silu(g: Graph, layer: Layer) -> Tensor | Skip | None:
    for x, gate in (layer.inputs, layer.inputs[::-1]):
        sigmoid = g.maker(gate)
        if sigmoid is None or sigmoid.op != "Sigmoid" or sigmoid.inputs[0] is not x or x is None or gate is None:
            continue
        head = g.maker(x)
        composite = anchored(head, CONVS + PRODUCTS)
        if head is None or not composite:
            return None
        if reason := obstacle(g, head, x, sigmoid, layer) or obstacle(g, sigmoid, gate, layer):
            return Skip(reason)
        if steps(head)[-1:] == ["activation"]:
            return Skip(f"'{head.name}' ends with an activation already")
        return fuse(g, composite, head, sigmoid, layer)
    return None
