"""Successive max poolings and the Concat of their input and all results (a detector's spatial pyramid) become one layer."""

from __future__ import annotations

from whet.composites._base import register_composite
from whet.composites._samples import Regions, make_body
from whet.network import I8, U8, Layer, Tensor
from whet.ops import Sample
from whet.rewrite.fusing import find_fusion_obstacle, fuse_nested
from whet.rewrite.graph import Graph
from whet.rewrite.rules import Skip


def pool_chain_sample(x: str, window: int, pools: int) -> Sample:
    """Concat(x, pool(x), pool(pool(x)), ...) along channels."""

    def build_regions() -> Regions:
        body, values = make_body([x], "x")
        for _ in range(pools):
            values.append(body.add("MaxPool", values[-1], kernel_shape=(window, window), pads=(window // 2,) * 4, strides=(1, 1)))
        body.mark_output(body.add("Concat", *values, axis=1))
        return {"body": body}

    return Sample([x], {"composite": "PoolChain"}, build_regions)


POOL_CHAIN = register_composite(
    "PoolChain",
    title="successive max poolings",
    unsupported="no tactic here computes successive poolings and concatenates them in one kernel",
    samples=[
        pool_chain_sample("f32[2,16,9,7]", 5, 3),
        pool_chain_sample("f32[1,40,20,20]", 5, 3),
        pool_chain_sample("f32[3,8,4,11]", 3, 2),
        pool_chain_sample("u8[2,32,9,7]", 5, 3),
    ],
)


@POOL_CHAIN.matcher("Concat")
def fuse_pool_chain(g: Graph, layer: Layer) -> Tensor | Skip | None:
    pools = _find_pools(g, layer)
    if not pools:
        return None
    windows = {_match_window(p) for p in pools}
    if len(windows) != 1 or None in windows:
        return Skip(f"'{pools[0].name}' and the poolings after it do not all keep the image's size with one odd, square window")
    for pool, after in zip(pools, (*pools[1:], None), strict=True):
        readers = (layer,) if after is None else (after, layer)
        is_integer = pool.output.dtype in (I8, U8)
        if reason := g.escapes(pool.output, *readers) if is_integer else find_fusion_obstacle(g, pool.output, *readers):
            return Skip(reason)
    return fuse_nested(g, POOL_CHAIN.kind, *pools, layer)


def _find_pools(g: Graph, concat: Layer) -> list[Layer]:
    """The two or more poolings of Concat(x, pool(x), pool(pool(x)), ...) along channels; none where the pattern does not match."""
    makers = [g.maker(t) for t in concat.inputs[1:]]
    if len(makers) < 2 or concat.output.type.rank != 4 or concat.attrs["axis"] % 4 != 1:
        return []
    pools = []
    for pool, source in zip(makers, concat.inputs, strict=False):
        if pool is None or pool.op != "MaxPool" or pool.inputs[0] is not source or source is None or source.is_constant or len(pool.outputs) != 1:
            return []
        pools.append(pool)
    return pools


def _match_window(pool: Layer) -> int | None:
    """The side of an odd, square window with stride 1 and "same" padding; None for another pooling."""
    a = pool.attrs
    side = int(a["kernel_shape"][0])
    keeps_size = tuple(a["kernel_shape"]) == (side, side) and side % 2 == 1 and tuple(a.get("pads") or (0,) * 4) == (side // 2,) * 4
    is_plain = set(a.get("strides") or (1,)) == {1} == set(a.get("dilations") or (1,)) and a.get("auto_pad", "NOTSET") in ("NOTSET", "")
    return side if keeps_size and is_plain else None
