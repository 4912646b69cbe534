"""The end of a classifier, global average pooling and the product behind it, becomes one layer; a reshape between them goes along."""

from __future__ import annotations

from whet.network import Layer, Tensor
from whet.passes._base import Phase, Skip, rule
from whet.passes._fuse import fuse_whole
from whet.passes._graph import Graph

_VIEWS = ("Flatten", "Reshape", "Squeeze")


@rule("Gemm", "MatMul", phase=Phase.FINAL)
def fuse_pool_gemm(g: Graph, layer: Layer) -> Tensor | Skip | None:
    x = layer.inputs[0]
    between = g.maker(x)
    members = [layer] if between is None or between.op not in _VIEWS else [between, layer]
    pool = g.maker(members[0].inputs[0])
    if pool is None or pool.op != "GlobalAveragePool" or pool.inputs[0] is None or pool.inputs[0].type.rank != 4:
        return None
    if layer.output.type.rank != 2 or x is None or x.type.rank != 2 or x.shape[0] != pool.output.shape[0]:
        return Skip("rows of the product are no images")
    if any(t is None or not t.is_constant for m in members for t in m.inputs[1:]):
        return Skip("the weights are computed at run time")
    if layer.attrs.get("transA") or layer.attrs.get("alpha", 1.0) != 1.0 or layer.attrs.get("beta", 1.0) != 1.0:
        return Skip("the product turns or scales what it reads")
    b = layer.input(2)
    if b is not None and (b.type.rank > 2 or b.shape[-1:] != layer.output.shape[-1:] or (b.type.rank == 2 and b.shape[0] != 1)):
        return Skip(f"%{b.name} is no row")
    for made, reader in zip((pool, *members), members, strict=False):
        if reason := g.shared(made.output, reader):
            return Skip(reason)
    return fuse_whole(g, "PoolGemm", pool, *members)
