"""A Transpose of an image's flattened pixels becomes one of the image itself, before it is flattened or after it is unflattened.

Patch embeddings and mixed networks write [N, C, H, W] -> [N, C, H * W] -> [N, H * W, C] and back. Between the image and [N, H, W, C] the Transpose
moves nothing if images are stored with channels last; the Reshape is a view in any case.
"""

from __future__ import annotations

from whet.network import Layer, Tensor
from whet.rewrite.graph import Graph
from whet.rewrite.matching import find_maker_of_op
from whet.rewrite.rules import Phase, Skip, rule


@rule("Transpose", "Reshape", phase=Phase.CLEAN, after=["cancel_reshapes", "cancel_transposes"])
def transpose_images(g: Graph, layer: Layer) -> Tensor | Skip | None:
    before = find_maker_of_op(g, layer.inputs[0], "Reshape" if layer.op == "Transpose" else "Transpose")
    transpose = layer if layer.op == "Transpose" else before
    if before is None or transpose is None or tuple(transpose.attrs["perm"]) != (0, 2, 1):
        return None
    x, y = before.needs(0), layer.output
    image = x if layer.op == "Transpose" else y
    flat = before.output
    if image.type.rank < 4 or flat.type.rank != 3 or tuple(image.shape[:2]) != tuple(flat.shape[:2]):
        return None
    if reason := g.escapes(flat, layer):
        return Skip(reason)
    last = image.type.rank - 1
    pixels = y.shape if layer.op == "Transpose" else (image.shape[0], *image.shape[2:], image.shape[1])
    if any(d == 0 for d in pixels) or not g.is_sized(pixels):
        return Skip(f"the shape of %{y.name}: {y.type} is not known")
    if layer.op == "Transpose":
        turned = g.add("Transpose", x, perm=(0, *range(2, last + 1), 1), name=f"{layer.name}_pixels", sources=layer.sources)
        return g.add("Reshape", turned, shape=pixels)
    rows = g.add("Reshape", x, shape=pixels, name=f"{layer.name}_pixels", sources=layer.sources)
    return g.add("Transpose", rows, perm=(0, last, *range(1, last)))
