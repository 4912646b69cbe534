"""A matrix product and the Mul by a gate become one layer (SwiGLU, GEGLU); the product stays a fused layer in the body.

Gated feed-forward blocks multiply two products of the same rows, one of them with an activation. The one that comes later reads the other's result in
its epilogue.
"""

from __future__ import annotations

from whet.composites._base import register_composite
from whet.composites._samples import Regions, activate, add_fused, make_body, parse_dims
from whet.network import Layer, Network, Tensor
from whet.ops import Sample
from whet.rewrite.fusing import PRODUCTS, find_fusion_obstacle, find_root_op, fuse_nested, list_epilogue_steps, outer_tensor
from whet.rewrite.graph import Graph
from whet.rewrite.rules import Skip


def gated_product_sample(x: str, columns: int, *, act: str = "", op: str = "MatMul", bias: bool = False) -> Sample:
    """act(x @ w [+ bias]) * gate."""
    *rows, inner = parse_dims(x)
    weights = f"const f32[{columns},{inner}]" if op == "Gemm" else f"const f32[{inner},{columns}]"
    inputs = [x, weights, *([f"const f32[{columns}]"] if bias else []), f"f32[{','.join(map(str, (*rows, columns)))}]"]

    def product(body: Network, read: list[Tensor]) -> Tensor:
        if op == "Gemm":
            y = body.add("Gemm", *read, transB=1)
        else:
            y = body.add("MatMul", *read[:2])
            y = body.add("Add", y, read[2]) if bias else y
        return activate(body, y, act) if act else y

    def regions() -> Regions:
        body, own = make_body(inputs)
        body.mark_output(body.add("Mul", add_fused(body, own[:-1], product, op), own[-1]))
        return {"body": body}

    return Sample(inputs, {"composite": "GatedProduct"}, regions)


GATED_PRODUCT = register_composite(
    "GatedProduct",
    title="matrix product and its gate",
    unsupported="no tactic here computes a product and the Mul of its result in one kernel",
    counts_parts=True,
    samples=[
        gated_product_sample("f32[2,50,128]", 96, bias=True),
        gated_product_sample("f32[130,208]", 72, op="Gemm", bias=True, act="Gelu"),
        gated_product_sample("f32[1,512,1024]", 2816),
        gated_product_sample("f32[4100,64]", 160, act="silu"),
    ],
)


@GATED_PRODUCT.matcher("Mul", after=["fuse_conv_sum"])
def fuse_gated_product(g: Graph, layer: Layer) -> Tensor | Skip | None:
    pairs = [(g.maker(t), t, layer.inputs[1 - i]) for i, t in enumerate(layer.inputs)]
    products = [(head, t, gate) for head, t, gate in pairs if head is not None and t is not None and find_root_op(head, PRODUCTS)]
    skip: Skip | None = None
    for head, value, gate in sorted(products, key=lambda p: -g.position(p[0])):  # the other value has been computed by then
        if gate is None or gate.is_constant or value is gate:
            continue
        root = next((x for x in head.regions["body"].layers if x.op in PRODUCTS), None) if head.op == "Fused" else head
        weights = None if root is None else outer_tensor(head, root.inputs[1])
        if weights is None or not weights.is_constant:
            continue
        reason = find_fusion_obstacle(g, value, layer)
        if value.type != layer.output.type or gate.type != value.type:
            reason = f"%{value.name}: {value.type} and %{gate.name}: {gate.type} broadcast"
        elif "add" in list_epilogue_steps(head):
            reason = reason or f"the epilogue of '{head.name}' has an Add"
        if reason is None:
            return fuse_nested(g, GATED_PRODUCT.kind, head, layer)
        skip = skip or Skip(reason)
    return skip
