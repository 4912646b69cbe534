"""ReduceMean over all spatial axes of an image becomes GlobalAveragePool (and a Squeeze if the axes are dropped)."""

from __future__ import annotations

from whet.network import Layer, Tensor
from whet.ops._reduce import list_reduced_axes
from whet.rewrite.graph import Graph
from whet.rewrite.rules import Phase, Skip, rule


@rule("ReduceMean", phase=Phase.RECOGNIZE)
def reduce_mean_to_pool(g: Graph, layer: Layer) -> Tensor | Skip | None:
    x = layer.inputs[0]
    if x is None or x.type.rank not in (4, 5) or not x.dtype.is_float:
        return None
    axes = list_reduced_axes(layer)
    if axes != tuple(range(2, x.type.rank)):
        return Skip(f"it reduces the axes {axes}, pooling reduces all axes after the channels")
    pooled = g.add("GlobalAveragePool", x)
    if layer.attrs["keepdims"]:
        return pooled
    return g.add("Squeeze", pooled, axes=axes)
