"""Heads of an image's channels are split from pixels with their channels last, and are merged so, where attention reads and writes them.

Attention after a convolution (CoAtNet, GCViT) splits channels first: [N, C, H, W] -> [N, heads, size, H * W]. Between the image and [N, H, W, C] a
Transpose moves nothing if images are stored with channels last; the heads of a pixel then are rows of memory, which attention reads in place.
"""

from __future__ import annotations

from whet.network import Layer, Tensor
from whet.rewrite.constants import scalar_value
from whet.rewrite.graph import Graph
from whet.rewrite.matching import find_maker_of_op
from whet.rewrite.rules import Phase, Skip, rule


@rule("Reshape", phase=Phase.CLEAN, after=["cancel_reshapes", "cancel_transposes", "untranspose_softmax"], level=2)
def heads_of_images(g: Graph, layer: Layer) -> Tensor | Skip | None:
    x, y = layer.needs(0), layer.output
    if x.type.rank != 4 or y.type.rank != 4 or not all(isinstance(d, int) and d > 0 for d in (*x.shape[1:], *y.shape[1:])):
        return None
    if _are_pixels(x, y) and _only_feeds_products(g, y):
        batch, heads, size, pixels = y.shape
        rows = g.add("Transpose", x, perm=(0, 2, 3, 1), name=f"{layer.name}_pixels", sources=layer.sources)
        return g.add("Transpose", g.add("Reshape", rows, shape=(batch, pixels, heads, size)), perm=(0, 2, 3, 1))
    turned = find_maker_of_op(g, x, "Transpose")
    if turned is None or tuple(turned.attrs["perm"]) != (0, 1, 3, 2) or not _are_pixels(y, x) or not _is_weighted_sum(g, turned.needs(0)):
        return None
    if reason := g.escapes(x, layer):
        return Skip(reason)
    batch, channels, height, width = y.shape
    rows = g.add("Transpose", turned.needs(0), perm=(0, 2, 1, 3), name=f"{layer.name}_pixels", sources=layer.sources)
    return g.add("Transpose", g.add("Reshape", rows, shape=(batch, height, width, channels)), perm=(0, 3, 1, 2))


def _are_pixels(image: Tensor, heads: Tensor) -> bool:
    """True if [N, C, H, W] and [N, heads, size, pixels] differ by their shape alone, and there are more pixels than one."""
    (_, channels, height, width), (_, count, size, pixels) = image.shape, heads.shape
    return image.shape[0] == heads.shape[0] and channels == count * size and pixels == height * width and pixels > 1 and height * width > width


def _only_feeds_products(g: Graph, t: Tensor) -> bool:
    """True if all that reads a tensor, also its parts, transposed or scaled, are products of two values."""
    if g.is_output(t) or not g.readers(t):
        return False
    for reader in g.readers(t):
        scales = reader.op in ("Mul", "Div") and any(scalar_value(x) is not None for x in reader.inputs)
        if scales or (reader.op in ("Slice", "Split", "Transpose") and reader.inputs[0] is t):
            if not all(_only_feeds_products(g, part) for part in reader.outputs):
                return False
        elif reader.op != "MatMul" or any(x is None or x.is_constant for x in reader.inputs):
            return False
    return True


def _is_weighted_sum(g: Graph, t: Tensor) -> bool:
    """True for the product of a softmax and values."""
    product = find_maker_of_op(g, t, "MatMul")
    return product is not None and find_maker_of_op(g, product.inputs[0], "Softmax") is not None
