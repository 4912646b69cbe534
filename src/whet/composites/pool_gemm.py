"""A classifier's end, global average pooling and the matrix product after it, becomes one layer, including a reshape between them."""

from __future__ import annotations

from whet.composites._base import register_composite
from whet.composites._samples import Regions, make_body, parse_dims
from whet.network import Layer, Tensor
from whet.ops import Sample
from whet.rewrite.fusing import fuse_nested
from whet.rewrite.graph import Graph
from whet.rewrite.rules import Skip

_VIEWS = ("Flatten", "Reshape", "Squeeze")


def pool_gemm_sample(x: str, columns: int, bias: bool = True) -> Sample:
    """Means over the image and a matrix product."""
    inputs = [x, f"const f32[{columns},{parse_dims(x)[1]}]", *([f"const f32[{columns}]"] if bias else [])]

    def build_regions() -> Regions:
        body, own = make_body(inputs)
        means = body.add("Flatten", body.add("GlobalAveragePool", own[0]), axis=1)
        body.mark_output(body.add("Gemm", means, *own[1:], transB=1))
        return {"body": body}

    return Sample(inputs, {"composite": "PoolGemm"}, build_regions)


POOL_GEMM = register_composite(
    "PoolGemm",
    title="global average pooling and matrix product",
    unsupported="no tactic here computes global pooling and a matrix product in one kernel",
    samples=[
        pool_gemm_sample("f32[1,512,7,7]", 100),
        pool_gemm_sample("f32[3,1280,7,7]", 1000),
        pool_gemm_sample("f32[4,40,5,4]", 10, bias=False),
        pool_gemm_sample("f32[1,2048,7,7]", 130),
    ],
)


@POOL_GEMM.matcher("Gemm", "MatMul")
def fuse_pool_gemm(g: Graph, layer: Layer) -> Tensor | Skip | None:
    x = layer.inputs[0]
    between = g.maker(x)
    members = [layer] if between is None or between.op not in _VIEWS else [between, layer]
    pool = g.maker(members[0].inputs[0])
    image = None if pool is None or pool.op != "GlobalAveragePool" else pool.inputs[0]
    if pool is None or image is None or image.type.rank != 4:
        return None
    if layer.output.type.rank != 2 or x is None or x.type.rank != 2 or x.shape[0] != pool.output.shape[0]:
        return Skip("the rows of the matrix product are not images")
    if any(t is None or not t.is_constant for m in members for t in m.inputs[1:]):
        return Skip("the weights are computed at run time")
    if layer.attrs.get("transA") or layer.attrs.get("alpha", 1.0) != 1.0 or layer.attrs.get("beta", 1.0) != 1.0:
        return Skip("the matrix product transposes or scales its input")
    b = layer.input(2)
    if b is not None and (b.type.rank > 2 or b.shape[-1:] != layer.output.shape[-1:] or (b.type.rank == 2 and b.shape[0] != 1)):
        return Skip(f"%{b.name} is not a row")
    for producer, reader in zip((pool, *members), members, strict=False):
        if reason := g.escapes(producer.output, reader):
            return Skip(reason)
    return fuse_nested(g, POOL_GEMM.kind, pool, *members)
