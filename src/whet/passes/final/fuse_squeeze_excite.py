"""Squeeze and excitation, the means of an image through two 1x1 convolutions and times the image, becomes one layer."""

from __future__ import annotations

from whet.network import Layer, Tensor
from whet.passes._base import Phase, Skip, rule
from whet.passes._fuse import anchored, conv_of, conv_read, fuse_whole, plain_product, steps
from whet.passes._graph import Graph


@rule("Mul", phase=Phase.FINAL, after=["fuse_conv_then_pointwise"])
def fuse_squeeze_excite(g: Graph, layer: Layer) -> Tensor | Skip | None:
    for x, gate in (layer.inputs, layer.inputs[::-1]):
        second = _product(g, gate)
        first = None if second is None else _product(g, conv_read(second, conv_of(second)))
        pool = None if first is None else g.maker(conv_read(first, conv_of(first)))
        if x is None or pool is None or second is None or first is None or pool.op != "GlobalAveragePool" or pool.inputs[0] is not x:
            continue
        if not x.dtype.is_float or x.type.rank != 4 or layer.output.type != x.type:
            return Skip(f"%{x.name}: {x.type} is no image in floating point")
        for made, reader in ((pool, first), (first, second), (second, layer)):
            if reason := g.shared(made.output, reader):
                return Skip(reason)
        if any(t is not None and not t.is_constant for m in (first, second) for t in m.inputs[1:]) or "add" in (*steps(first), *steps(second)):
            return Skip("a product of the means reads more than these")
        return fuse_whole(g, "SqueezeExcite", pool, first, second, layer)
    return None


def _product(g: Graph, t: Tensor | None) -> Layer | None:
    """The 1x1 convolution of one group, alone or fused, that makes `t` of numbers for whole images."""
    made = g.maker(t)
    if t is None or made is None or anchored(made, ("Conv",)) != "Conv" or t.type.rank != 4 or t.shape[2:] != (1, 1):
        return None
    conv = conv_of(made)
    return made if plain_product(conv) and conv.attrs["group"] == 1 else None
