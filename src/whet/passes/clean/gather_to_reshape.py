"""A Gather of all entries in their order is a Reshape, also as GatherND.

transformers reads the padding mask by indices of all positions: mask.flatten()[batch * length + position], or mask[batch, position].
"""

from __future__ import annotations

from math import prod

import numpy as np

from whet.network import Layer, Tensor
from whet.rewrite.graph import Graph
from whet.rewrite.rules import Phase, Skip, rule


@rule("Gather", "GatherND", phase=Phase.CLEAN, after=["fold_constants", "fold_shapes"])
def gather_to_reshape(g: Graph, layer: Layer) -> Tensor | Skip | None:
    x, index = layer.needs(0), layer.needs(1)
    if not index.is_constant or x.is_constant or not x.type.static or not layer.output.type.static:
        return None
    at = np.asarray(index.array())
    if layer.op == "Gather":
        sizes: tuple[int, ...] = (int(x.shape[layer.attrs["axis"] % x.type.rank]),)
        at = at.reshape(-1, 1)
    else:
        if layer.attrs["batch_dims"] or not at.size:
            return None
        sizes = tuple(int(d) for d in x.shape[: at.shape[-1]])
        at = at.reshape(-1, at.shape[-1])
    if len(at) != prod(sizes) or not len(at):
        return None
    places = np.zeros(len(at), np.int64)
    for d, n in enumerate(sizes):
        places += at[:, d] % n * prod(sizes[d + 1 :])
    if not np.array_equal(places, np.arange(len(at))):
        return Skip(f"%{index.name} has all places in another order")
    return g.add("Reshape", x, shape=tuple(layer.output.shape))
