"""A matrix product and the number that its result is multiplied or divided by become one layer (attention's scale)."""

from __future__ import annotations

from whet.network import Layer, Tensor
from whet.passes._base import Phase, Skip, rule
from whet.passes._fuse import PRODUCTS, anchored, fuse, obstacle, steps
from whet.passes._graph import Graph
from whet.passes._weights import scalar


@rule("Div", "Mul", phase=Phase.FUSE, after=["recognize_attention"])
def fuse_gemm_scale(g: Graph, layer: Layer) -> Tensor | Skip | None:
    for value, number in (layer.inputs, layer.inputs[::-1]) if layer.op == "Mul" else (layer.inputs,):
        head = g.maker(value)
        composite = anchored(head, PRODUCTS)
        if head is None or value is None or not composite or scalar(number) is None or layer.output.type != value.type:
            continue
        if reason := obstacle(g, head, value, layer):
            return Skip(reason)
        if steps(head):
            return Skip(f"'{head.name}' has an epilogue already")
        return fuse(g, composite, head, layer)
    return None
