"""Max poolings in a row and the Concat of what went in and what each gives (a detector's spatial pyramid) become one layer."""

from __future__ import annotations

from whet.network import I8, U8, Layer, Tensor
from whet.passes._base import Phase, Skip, rule
from whet.passes._fuse import fuse_whole, obstacle
from whet.passes._graph import Graph

KIND = "PoolChain"


@rule("Concat", phase=Phase.FINAL)
def fuse_pool_chain(g: Graph, layer: Layer) -> Tensor | Skip | None:
    pools = _chain(g, layer)
    if not pools:
        return None
    windows = {pool_window(p) for p in pools}
    if len(windows) != 1 or None in windows:
        return Skip(f"'{pools[0].name}' and those behind it do not all keep the image's size with one odd, square window")
    for pool, after in zip(pools, (*pools[1:], None), strict=True):
        readers = (layer,) if after is None else (after, layer)
        integers = pool.output.dtype in (I8, U8)
        if reason := g.shared(pool.output, *readers) if integers else obstacle(g, pool, pool.output, *readers):
            return Skip(reason)
    return fuse_whole(g, KIND, *pools, layer)


def _chain(g: Graph, joined: Layer) -> list[Layer]:
    """The poolings of Concat(x, pool(x), pool(pool(x)), ...) along channels; none where it is not one of these, of two poolings at least."""
    pools = [g.maker(t) for t in joined.inputs[1:]]
    if len(pools) < 2 or joined.output.type.rank != 4 or joined.attrs["axis"] % 4 != 1:
        return []
    found = []
    for pool, source in zip(pools, joined.inputs, strict=False):
        if pool is None or pool.op != "MaxPool" or pool.inputs[0] is not source or source is None or source.is_constant or len(pool.outputs) != 1:
            return []
        found.append(pool)
    return found


def pool_window(pool: Layer) -> int | None:
    """The side of a max pooling's window that is square and odd, in steps of one, with as much padding as keeps the image's size; else None."""
    a = pool.attrs
    side = int(a["kernel_shape"][0])
    keeps = tuple(a["kernel_shape"]) == (side, side) and side % 2 == 1 and tuple(a.get("pads") or (0,) * 4) == (side // 2,) * 4
    plain = set(a.get("strides") or (1,)) == {1} == set(a.get("dilations") or (1,)) and a.get("auto_pad", "NOTSET") in ("NOTSET", "")
    return side if keeps and plain else None
