"""A layer or root-mean-square normalization and the matrix product that alone reads it become one layer; the product stays a fused layer in the body.

Transformers with the norm first (ViT, GPT-2, Llama) and ConvNeXt have it before each product but those that end a residual branch.
"""

from __future__ import annotations

import numpy as np

from whet.composites._base import register_composite
from whet.composites._samples import Regions, activate, add_fused, make_body, parse_dims
from whet.network import Layer, Network, Tensor
from whet.ops import Sample
from whet.rewrite.fusing import PRODUCTS, find_fusion_obstacle, find_root_op, fuse_nested, outer_tensor
from whet.rewrite.graph import Graph
from whet.rewrite.rules import Skip

NORMS = ("LayerNormalization", "RMSNormalization")


def make_norm_product_sample(x: str, columns: int, *, act: str = "", op: str = "MatMul", rms: bool = False, residual: bool = False) -> Sample:
    """act(norm(x) @ w + bias) [+ residual]; the norm has a scale, the layer norm a shift too."""
    *rows, inner = parse_dims(x)
    norm: list[str | np.ndarray] = [f"const f32[{inner}]"] * (1 if rms else 2)
    weights = f"const f32[{columns},{inner}]" if op == "Gemm" else f"const f32[{inner},{columns}]"
    inputs: list[str | np.ndarray] = [x, *norm, weights, f"const f32[{columns}]"]
    inputs += [f"f32[{','.join(map(str, (*rows, columns)))}]"] if residual else []

    def build_product(body: Network, read: list[Tensor]) -> Tensor:
        y = body.add("Gemm", *read[:3], transB=1) if op == "Gemm" else body.add("Add", body.add("MatMul", *read[:2]), read[2])
        y = activate(body, y, act) if act else y
        return body.add("Add", y, read[3]) if residual else y

    def build_regions() -> Regions:
        body, own = make_body(inputs)
        normed = body.add("RMSNormalization" if rms else "LayerNormalization", *own[: 1 + len(norm)], axis=-1, epsilon=1e-5)
        body.mark_output(add_fused(body, [normed, *own[1 + len(norm) :]], build_product, op))
        return {"body": body}

    return Sample(inputs, {"composite": "NormThenProduct"}, build_regions)


NORM_THEN_PRODUCT = register_composite(
    "NormThenProduct",
    title="normalization and matrix product",
    unsupported="no tactic here computes a normalization and the product that reads it in one kernel",
    counts_parts=True,
    samples=[
        make_norm_product_sample("f32[2,50,128]", 96, act="Gelu"),
        make_norm_product_sample("f32[197,768]", 2304),
        make_norm_product_sample("f32[1,9,11,96]", 384, act="Gelu"),
        make_norm_product_sample("f32[130,208]", 72, op="Gemm", act="Relu"),
        make_norm_product_sample("f32[3,40,256]", 64, rms=True, residual=True),
        make_norm_product_sample("f32[4100,64]", 128, act="Gelu", residual=True),
    ],
)


@NORM_THEN_PRODUCT.matcher("*", after=["fuse_conv_sum"])
def fuse_norm_then_product(g: Graph, layer: Layer) -> Tensor | Skip | None:
    if not find_root_op(layer, PRODUCTS):
        return None
    head = next((x for x in layer.regions["body"].layers if x.op in PRODUCTS), None) if layer.op == "Fused" else layer
    value, weights = (None if head is None else outer_tensor(layer, head.inputs[i]) for i in range(2))
    norm = g.maker(value)
    if norm is None or value is None or norm.op not in NORMS or weights is None or not weights.is_constant:
        return None
    if int(norm.attrs["axis"]) % value.type.rank != value.type.rank - 1:
        return Skip(f"'{norm.name}' normalizes several axes together")
    if any(t is not None and not t.is_constant for t in norm.inputs[1:]) or len(norm.outputs) > 1:
        return Skip(f"'{norm.name}' computes more than its result, or its scale is computed at run time")
    if layer.inputs.count(value) > 1:
        return Skip(f"%{value.name} is also the residual")
    if reason := find_fusion_obstacle(g, value, layer):
        return Skip(reason)
    return fuse_nested(g, NORM_THEN_PRODUCT.kind, norm, layer)
