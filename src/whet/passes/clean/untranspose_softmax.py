"""Values times transposed weights of attention, MatMul(v, Transpose(p)), become Transpose(MatMul(p, Transpose(v))), as other networks write it.

Attention of images with channels before pixels (SHViT, YOLO11) is written so. There are as many weights as pairs of pixels, so the values and the
result have fewer elements to transpose than the weights.
"""

from __future__ import annotations

from whet.network import Layer, Tensor
from whet.rewrite.graph import Graph
from whet.rewrite.matching import find_maker_of_op
from whet.rewrite.rules import Phase, Skip, rule


@rule("MatMul", phase=Phase.CLEAN, after=["fold_constants", "fold_shapes"], level=2)
def untranspose_softmax(g: Graph, layer: Layer) -> Tensor | Skip | None:
    values, turned = layer.inputs
    transpose = find_maker_of_op(g, turned, "Transpose")
    softmax = find_maker_of_op(g, transpose.inputs[0], "Softmax") if transpose is not None else None
    if transpose is None or softmax is None or values is None or turned is None or values.is_constant or values.type.rank != turned.type.rank:
        return None
    rank = turned.type.rank
    swapped = (*range(rank - 2), rank - 1, rank - 2)
    if tuple(transpose.attrs["perm"]) != swapped:
        return None
    if softmax.attrs["axis"] not in (-1, rank - 1):
        return None
    for t, reader in ((softmax.output, transpose), (turned, layer)):
        if reason := g.escapes(t, reader):
            return Skip(reason)
    product = g.add("MatMul", softmax.output, g.add("Transpose", values, perm=swapped), name=f"{layer.name}_rows", sources=layer.sources)
    return g.add("Transpose", product, perm=swapped)
